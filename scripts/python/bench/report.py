"""The tables, as Markdown and for a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby

from rich.table import Table

from bench.cases import Case, Way, size_name
from bench.cpu import GROUPS
from bench.figures import PERCENTS, Figures, Ratio, Round, latency_ratio, median_figures, rate_ratio
from bench.machine import Machine

Results = Mapping[Way, Mapping[Case, Sequence[Round]]]


@dataclass(frozen=True)
class Run:
    """How the figures were made."""

    command: str
    day: date
    machine: Machine
    rounds: int
    seconds: float
    client_processes: int


def triton_figures(results: Results, case: Case) -> Figures:
    """Return the medians of Triton itself over the rounds of all ways."""
    return median_figures([each.triton for by_case in results.values() for each in by_case[case]])


def endpoint_figures(results: Results, way: Way, case: Case) -> Figures:
    """Return the medians of one way."""
    return median_figures([each.endpoint for each in results[way][case]])


def markdown(run: Run, results: Results, *, plot: str) -> str:
    """Return the page.

    Args:
        run: how the figures were made.
        results: of every way the same cases.
        plot: the plot's file name.
    """
    machine = run.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    head = f"""# Benchmarks

What the endpoint costs: the same requests sent straight to a Triton, and to the same Triton through the endpoint.
Written on {run.day.isoformat()} by

    {run.command}

and not to be edited by hand.

- Machine: {machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB of memory.
  Clients, endpoint and Triton share it.
- Versions: {versions}.
- Model: identity, in Triton's Python backend, one instance on CPU, no batching. A model that has work to do takes
  longer, and what the endpoint adds weighs less.
- Callers are closed loops: each sends its next request when it has the answer to the last one; a stream is the same on
  one ModelStreamInfer. They live in up to {run.client_processes} processes with one connection each, and send
  bytes made beforehand; the CPU time that they take from the servers is in the column `client`.
- {run.rounds} rounds of {run.seconds:g} s. In each, Triton and the endpoint are measured one right after the
  other, in turns. "of Triton" is the median of the rounds' ratios, with the smallest and the largest; all else is the
  median of the rounds.
- CPU seconds hold what a process does in the background too; of the rest of Ray that is nearly all, and it weighs the
  more, the fewer answers a second there are.

![answers per second, latency and CPU time]({plot})
"""
    parts = [head]
    cases = list(next(iter(results.values())))
    for (rpc, size), group in groupby(cases, key=lambda case: (case.rpc, case.size)):
        same_size = list(group)
        noun = "streams" if rpc == "ModelStreamInfer" else "callers"
        parts.append(f"## {rpc}, {size_name(size)}\n")
        parts.append(_markdown_table(speed_header(noun), speed_rows(results, same_size)))
        parts.append("CPU seconds for a thousand answers:\n")
        parts.append(_markdown_table(cpu_header(noun), cpu_rows(results, same_size)))
    return "\n".join(parts)


def terminal_table(results: Results, way: Way) -> Table:
    """Return what one way costs, in the width of a terminal."""
    table = Table("load", box=None, title=f"{way} beside Triton", title_justify="left")
    for name in ("Triton/s", "endpoint/s", "of Triton", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for case, rounds in results[way].items():
        table.add_row(
            f"{case.rpc} {size_name(case.size)} x {case.callers}",
            number(median_figures([each.triton for each in rounds]).rate),
            number(endpoint_figures(results, way, case).rate),
            _ratio(rate_ratio(rounds)),
            f"{latency_ratio(rounds, 99).median:.2f}",
        )
    return table


def speed_header(noun: str) -> list[str]:
    """Return the columns of `speed_rows`."""
    return [noun, "way", "answers/s", "of Triton", *(f"p{percent} ms" for percent in PERCENTS), "p99 of Triton"]


def speed_rows(results: Results, cases: Iterable[Case]) -> list[list[str]]:
    """Return a row for Triton and for each way, case by case."""
    rows = []
    for case in cases:
        rows.append([str(case.callers), "Triton", *_speed(triton_figures(results, case), "", "")])
        for way, by_case in results.items():
            rate, p99 = rate_ratio(by_case[case]), latency_ratio(by_case[case], 99)
            speed = _speed(endpoint_figures(results, way, case), _ratio(rate), _ratio(p99))
            rows.append([str(case.callers), str(way), *speed])
    return rows


def cpu_header(noun: str) -> list[str]:
    """Return the columns of `cpu_rows`."""
    return [noun, "way", *GROUPS, "sum"]


def cpu_rows(results: Results, cases: Iterable[Case]) -> list[list[str]]:
    """Return a row for Triton and for each way, case by case."""
    rows = []
    for case in cases:
        rows.append([str(case.callers), "Triton", *_cpu(triton_figures(results, case))])
        rows += [[str(case.callers), str(way), *_cpu(endpoint_figures(results, way, case))] for way in results]
    return rows


def _speed(figures: Figures, rate_ratio: str, p99_ratio: str) -> list[str]:
    latencies = [number(figures.latency_ms[percent]) for percent in PERCENTS]
    return [number(figures.rate), rate_ratio, *latencies, p99_ratio]


def _cpu(figures: Figures) -> list[str]:
    return [number(figures.cpu_s[group]) for group in GROUPS] + [number(sum(figures.cpu_s.values()))]


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def number(value: float) -> str:
    """Return a number of at least 0 with three digits that mean something, or all before the point."""
    if value < 0.0005:
        return "0"
    decimals = next((decimals for decimals, limit in ((3, 1), (2, 10), (1, 100)) if value < limit), 0)
    return f"{value:,.{decimals}f}"


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---:" if name != "way" else "---" for name in header]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))
