"""Command line of scripts/bench."""

import argparse
import shlex
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import cpu_triton
from bench.cases import (
    INGRESSES,
    Case,
    Way,
    all_cases,
    all_ways,
    parse_count,
    parse_ingress,
    parse_list,
    parse_positive,
    parse_size,
)
from bench.client import CLIENT_PROCESSES, ClientPool, Load
from bench.cpu import CpuMeter
from bench.endpoint import Endpoint, running_endpoint
from bench.errors import BenchError
from bench.figures import Figures, Round
from bench.machine import this_machine
from bench.measure import measure
from bench.messages import identity_request, write_identity_model
from bench.plot import write_plot
from bench.report import Run, markdown, terminal_table
from bench.triton import server_version

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Plan:
    """What to measure, and how long."""

    ways: list[Way]
    cases: list[Case]
    rounds: int
    seconds: float
    output: Path

    @property
    def measurements(self) -> int:
        """How many there are in all."""
        return len(self.ways) * len(self.cases) * self.rounds * 2


def _plan() -> Plan:
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Starts the endpoint on this machine, one kind after the other, and measures each in turns with "
        "the Triton behind it. Writes benchmarks.md and benchmarks.svg. Lists are comma-separated.",
    )
    add = parser.add_argument
    add("--ingress", type=parse_list(parse_ingress), default=list(INGRESSES), help="default: direct,replica,python")
    add(
        "--forwarders",
        type=parse_list(parse_count),
        default=[1],
        help="forwarder replicas for one Triton, where requests pass through them (default: 1)",
    )
    add("--callers", type=parse_list(parse_count), default=[1, 8, 64], help="closed loops at once (default: 1,8,64)")
    add(
        "--sizes",
        type=parse_list(parse_size),
        default=[16, 100_000, 1_000_000, 12_600_000],
        help="bytes there and back (default: 16,100k,1m,12.6m); streams take the smallest",
    )
    add("--rounds", type=parse_count, default=6, help="how often each figure is measured (default: 6)")
    add("--seconds", type=parse_positive, default=3.0, help="of one measurement (default: 3)")
    add("--output", type=Path, default=ROOT / "docs", help="folder of the table and the plot (default: docs)")
    given = parser.parse_args()
    return Plan(
        ways=all_ways(given.ingress, given.forwarders),
        cases=all_cases(given.sizes, given.callers),
        rounds=given.rounds,
        seconds=given.seconds,
        output=given.output,
    )


class _Bench:
    def __init__(self, plan: Plan, clients: ClientPool, progress: Progress) -> None:
        self._plan = plan
        self._clients = clients
        self._progress = progress
        self._task = progress.add_task("", total=plan.measurements)
        self._requests = {case.size: identity_request(case.size) for case in plan.cases}

    def measure_way(self, way: Way, endpoint: Endpoint) -> dict[Case, list[Round]]:
        """Go through all loads, round by round, so that a slow minute of the machine spoils no figure alone."""
        meter = CpuMeter(endpoint=endpoint.process, clients=self._clients.pids)
        rounds: dict[Case, list[Round]] = {case: [] for case in self._plan.cases}
        for index in range(self._plan.rounds):
            if not self._progress.console.is_terminal:
                self._progress.console.print(f"{way}: round {index + 1} of {self._plan.rounds}")
            for case in self._plan.cases:
                self._progress.update(self._task, description=f"{way}: round {index + 1}, {case}")
                addresses = {"triton": endpoint.triton_address, "endpoint": endpoint.address}
                # The second of two has an advantage or a disadvantage; each is the second in turn.
                order = list(addresses) if index % 2 == 0 else list(addresses)[::-1]
                pair = {name: self._measure(case, addresses[name], meter) for name in order}
                rounds[case].append(Round(**pair))
        return rounds

    def _measure(self, case: Case, address: str, meter: CpuMeter) -> Figures:
        request, answer = self._requests[case.size]
        load = Load(address, case.rpc, request, answer_ends_with=answer, callers=case.callers)
        try:
            figures = measure(self._clients, load, seconds=self._plan.seconds, meter=meter)
        except BenchError as error:
            raise BenchError(f"{case}: {error}") from None
        self._progress.advance(self._task)
        return figures


def _bench(plan: Plan, console: Console) -> None:
    cpu_triton.find()
    plan.output.mkdir(parents=True, exist_ok=True)
    results: dict[Way, dict[Case, list[Round]]] = {}
    triton_version = ""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-models-")))
        write_identity_model(models)
        clients = stack.enter_context(ClientPool(CLIENT_PROCESSES))
        progress = stack.enter_context(Progress(*columns, TimeRemainingColumn(), console=console, transient=True))
        bench = _Bench(plan, clients, progress)
        for way in plan.ways:
            with running_endpoint(way, models) as endpoint:
                triton_version = server_version(endpoint.triton_address)
                results[way] = bench.measure_way(way, endpoint)
            console.print(terminal_table(results, way))
            # After each, so that one that fails takes none of the others along.
            _write(plan, results, triton_version)
    console.print(f"wrote benchmarks.md and benchmarks.svg in {plan.output}", soft_wrap=True)


def _write(plan: Plan, results: dict[Way, dict[Case, list[Round]]], triton_version: str) -> None:
    run = Run(
        command=shlex.join(["scripts/bench", *sys.argv[1:]]),
        day=datetime.now(UTC).date(),
        machine=this_machine(triton_version),
        rounds=plan.rounds,
        seconds=plan.seconds,
        client_processes=CLIENT_PROCESSES,
    )
    plot = plan.output / "benchmarks.svg"
    write_plot(results, plot)
    (plan.output / "benchmarks.md").write_text(markdown(run, results, plot=plot.name))


def _terminate(_signum: int, _frame: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main() -> None:
    """Measure, and write what came out."""
    plan = _plan()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        _bench(plan, Console())
    except (BenchError, OSError) as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        sys.exit("bench: interrupted")


if __name__ == "__main__":
    main()
