"""Command line of scripts/target-ongoing-requests."""

import argparse
import signal
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench.cases import parse_count, parse_positive
from bench.client import CLIENT_PROCESSES, ClientPool, Load
from bench.errors import BenchError
from bench.figures import Figures, median_figures
from bench.measure import measure
from bench.messages import synthetic_request
from bench.report import number
from bench.search import ENOUGH, Found, search
from bench.triton import model_config, model_metadata

# Well below the forwarder's max_ongoing_requests.
MOST_CALLERS = 512
WINDOWS = 3


def _shape(text: str) -> tuple[str, list[int]]:
    name, colon, dims = text.rpartition(":")
    try:
        shape = [int(dim) for dim in dims.split(",")]
    except ValueError:
        shape = [-1]
    if not (name and colon) or min(shape) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not INPUT:D1,D2... with dimensions of 0 or more")
    return name, shape


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="target-ongoing-requests",
        description="Sends a model made-up requests, with more and more callers at once, and prints the "
        "target_ongoing_requests that suits a latency goal. Measure a Triton as one replica will have it: the same "
        "hardware and model configuration, without other load.",
    )
    add = parser.add_argument
    add("--triton", metavar="HOST:PORT", default="127.0.0.1:8001", help="its gRPC (default: 127.0.0.1:8001)")
    add("--model", metavar="NAME", required=True)
    add("--p95-ms", metavar="MS", type=parse_positive, required=True, help="the goal: 95 in 100 answers within it")
    add(
        "--shape",
        metavar="INPUT:D1,D2...",
        type=_shape,
        action="append",
        default=[],
        help="of an input with open dimensions (-1), without the batch dimension; may be given several times",
    )
    add("--batch-size", metavar="N", type=parse_count, default=1, help="of each request (default: 1)")
    add(
        "--seconds",
        metavar="S",
        type=parse_positive,
        default=2.0,
        help=f"of each of the {WINDOWS} measurements for a number of callers (default: 2)",
    )
    return parser.parse_args()


def _request(triton: str, model: str, *, batch_size: int, shapes: Sequence[tuple[str, list[int]]]) -> bytes:
    batched = model_config(triton, model).max_batch_size > 0
    metadata = model_metadata(triton, model)
    return synthetic_request(metadata, batched=batched, batch_size=batch_size, shapes=dict(shapes))


def _search(given: argparse.Namespace, console: Console) -> Found:
    request = _request(given.triton, given.model, batch_size=given.batch_size, shapes=given.shape)
    with ClientPool(CLIENT_PROCESSES) as clients, console.status("") as status:

        def look(callers: int) -> Figures:
            status.update(f"{callers} at once")
            load = Load(given.triton, "ModelInfer", request, answer_ends_with=b"", callers=callers)
            return median_figures([measure(clients, load, seconds=given.seconds) for _ in range(WINDOWS)])

        return search(look, goal_ms=given.p95_ms, most=MOST_CALLERS)


def _show(found: Found, goal_ms: float, console: Console) -> None:
    table = Table(box=None)
    for name in ("callers", "answers/s", "p50 ms", "p95 ms", "p99 ms"):
        table.add_column(name, justify="right")
    for callers, figures in found.curve.items():
        table.add_row(str(callers), number(figures.rate), *(number(value) for value in figures.latency_ms.values()))
    console.print(table)
    limit = ", the most tried" if found.goal_holds_up_to == MOST_CALLERS else ""
    console.print(f"p95 stays within {goal_ms:g} ms up to {found.goal_holds_up_to} requests at once{limit}")
    if found.exhausted_from:
        console.print(
            f"{found.exhausted_from} reach {ENOUGH:.0%} of the best throughput within the goal; more only queue"
        )
    console.print(f"target_ongoing_requests: {found.target}")


def _terminate(_signum: int, _frame: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main() -> None:
    """Measure, and print the value."""
    given, console = _arguments(), Console(highlight=False)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        _show(_search(given, console), given.p95_ms, console)
    except BenchError as error:
        sys.exit(f"target-ongoing-requests: {error}")
    except KeyboardInterrupt:
        sys.exit("target-ongoing-requests: interrupted")


if __name__ == "__main__":
    main()
