"""scripts/local-endpoint for the time of a `with` block, and its Triton, which can be called without it."""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.cases import Way
from bench.errors import BenchError
from local_endpoint import processes

_PROGRAM = Path(__file__).parents[3] / "scripts/local-endpoint"
_START_S = 300
_STOP_S = 60


@dataclass(frozen=True)
class Endpoint:
    """An endpoint that answers."""

    address: str
    """host:port for clients."""
    triton_address: str
    """host:port of the Triton behind it."""
    process: psutil.Process
    """The ancestor of all its processes."""


@contextmanager
def running_endpoint(way: Way, models: Path) -> Iterator[Endpoint]:
    """Run an endpoint.

    Raises:
        BenchError: it did not start.
    """
    options = ["--ingress", way.ingress, "--models", str(models), "--grpc-port", "0"]
    if way.forwarders > 1:
        options += ["--forwarders", str(way.forwarders)]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        output = Path(folder) / "output"
        program = processes.start([str(_PROGRAM), *options], env=dict(os.environ), log=output)
        try:
            deadline = time.monotonic() + _START_S
            while not (address := _told(output, r"endpoint: (.+)")):
                if program.poll() is not None:
                    raise BenchError(f"no endpoint {way}: {_reason(output)}")
                if time.monotonic() > deadline:
                    raise BenchError(f"no endpoint {way} within {_START_S} s")
                time.sleep(0.1)
            triton_address = _told(output, r"triton: .* at (\S+) +\(pid \d+\)")
            yield Endpoint(address, triton_address, psutil.Process(program.pid))
        finally:
            processes.stop(program, within_s=_STOP_S)


def _told(output: Path, line: str) -> str:
    found = re.search(rf"^{line}$", output.read_text(), re.MULTILINE)
    return found[1] if found else ""


def _reason(output: Path) -> str:
    lines = output.read_text().strip().splitlines() or ["it said nothing"]
    # Its own line; after that may come the end of a log.
    return next((line for line in lines if line.startswith("local-endpoint: ")), lines[-1])
