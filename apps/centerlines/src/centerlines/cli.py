"""The command `centerlines`."""

import argparse
import math
import os
import re
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NoReturn

from rich.console import Console

from centerlines.compare_command import add_compare, compare
from centerlines.errors import CenterlinesError, UsageError
from centerlines.jobs import build_tile_jobs
from centerlines.raster import parse_bands
from centerlines.storage import find_tiles

__all__ = ["run"]


HOST_PORT = re.compile(r"(?:[^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the rest of this package does, without the usage around it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.prog} --help tells what can be given")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="centerlines", description="Sidewalk centerlines from aerial GeoTIFF tiles, through a Triton endpoint."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "run",
        help="turn tiles into centerlines",
        description="Turn tiles into centerlines. Exit code: 0, no tile failed; 1, some did; 2, bad arguments.",
    )
    command.add_argument(
        "tiles",
        metavar="TILE_OR_FOLDER_OR_S3_PREFIX",
        nargs="+",
        help="GeoTIFFs, folders of them, or s3://BUCKET/PREFIX",
    )
    command.add_argument("--endpoint", metavar="HOST:PORT", required=True, help="speaks Triton's gRPC protocol")
    command.add_argument("--model", metavar="NAME", required=True, help="the segmentation model at the endpoint")
    command.add_argument("--model-version", metavar="N", default="", help="default: the latest")
    command.add_argument("--output", metavar="DIR", required=True, help="folder for the results")
    command.add_argument("--job-id", metavar="NAME", default="", help="name of this set of tiles (default: the time)")
    command.add_argument("--chip-size", metavar="PIXELS", type=int, default=256, help="default: 256")
    command.add_argument("--chip-overlap", metavar="PIXELS", type=int, default=32, help="default: 32")
    command.add_argument(
        "--batch-size", metavar="CHIPS", type=int, default=200, help="most chips in one request (default: 200)"
    )
    command.add_argument(
        "--threshold", metavar="P", type=float, default=0.5, help="least probability of a sidewalk (default: 0.5)"
    )
    command.add_argument("--bands", metavar="R=1,G=2,B=3,NIR=4", help="band numbers; default: what the tiles say")
    command.add_argument("--loaders", metavar="N", type=int, default=1, help="actors that read tiles (default: 1)")
    command.add_argument(
        "--postprocessors", metavar="N", type=int, default=1, help="actors that blend and draw (default: 1)"
    )
    command.add_argument(
        "--wait-for-endpoint",
        metavar="SECONDS",
        type=float,
        default=120.0,
        help="how long the endpoint may be unavailable before the run ends (default: 120)",
    )
    command.add_argument(
        "--ray-address", metavar="ADDRESS", help="a Ray cluster (default: RAY_ADDRESS, or a Ray of its own)"
    )
    command.set_defaults(function=_run_tiles)
    add_compare(commands).set_defaults(function=compare)
    return parser


def _run_tiles(given: argparse.Namespace) -> int:
    address = HOST_PORT.fullmatch(given.endpoint)
    if not address or not 0 < int(address[1]) < 65536:
        raise UsageError(f"--endpoint {given.endpoint!r}: write HOST:PORT, for example 127.0.0.1:9000")
    if not given.model:
        raise UsageError("--model '': must be the name of a model at the endpoint")
    if not given.output:
        raise UsageError("--output '': name a folder for the results")
    if not 0 <= given.wait_for_endpoint < math.inf:
        raise UsageError(f"--wait-for-endpoint {given.wait_for_endpoint:g}: must be 0 or more seconds")
    bands = None if given.bands is None else parse_bands(given.bands)
    paths, source = find_tiles(given.tiles)
    job_id = given.job_id or datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    jobs = build_tile_jobs(
        paths, job_id, requested_chip_size=given.chip_size, requested_chip_overlap=given.chip_overlap, bands=bands
    )
    # Ray warns at its start about a variable that has nothing to do with machines without accelerators.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from centerlines.controller import main
    from centerlines.display import display_for

    console = Console()
    tiles = "1 tile" if len(jobs) == 1 else f"{len(jobs)} tiles"
    console.print(f"{tiles}, model {given.model} at {given.endpoint}", highlight=False, soft_wrap=True)
    with display_for(console) as display:
        result = main(
            jobs,
            job_id,
            given.endpoint,
            given.model,
            given.model_version,
            given.loaders,
            given.postprocessors,
            "local" if source.store is None else "s3",
            source.store,
            output=given.output,
            batch_size=given.batch_size,
            threshold=given.threshold,
            patience_s=given.wait_for_endpoint,
            ray_address=given.ray_address,
            display=display,
        )
    console.print(f"results: {result.output}", highlight=False, soft_wrap=True)
    console.print(f"report:  {result.output / 'report.html'}", highlight=False, soft_wrap=True)
    return result.exit_code


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code."""
    stopped_by = signal.SIGINT

    def terminate(_signum: int, _frame: object) -> None:
        """End the run as Ctrl-C does. Kept apart by a variable: Ray raises a KeyboardInterrupt of its own instead."""
        nonlocal stopped_by
        stopped_by = signal.SIGTERM
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    try:
        given = _parser().parse_args(arguments)
        code: int = given.function(given)
    except UsageError as error:
        print(f"centerlines: {error}", file=sys.stderr)  # noqa: T201
        code = 2
    except CenterlinesError as error:
        print(f"centerlines: {error}", file=sys.stderr)  # noqa: T201
        code = 1
    except KeyboardInterrupt:
        message = f"centerlines: stopped by {stopped_by.name}; progress.csv tells which tiles have ended"
        print(message, file=sys.stderr)  # noqa: T201
        code = 128 + stopped_by
    sys.exit(code)
