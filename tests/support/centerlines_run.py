"""The command `centerlines run` as its user starts it, and what it has written."""

import csv
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray
import tritonclient.grpc as triton_grpc

from tests.support.started import Started, describe, wait_for_exit

PROGRAM = Path(__file__).parents[2] / ".venv/bin/centerlines"

# Bounds against a hang, far above what is ever needed.
RUN_S = 300
STOP_S = 30


@dataclass(frozen=True)
class CenterlinesRun:
    """A started run."""

    process: subprocess.Popen[bytes]
    started: Started
    results: Path
    """What --output names."""
    logs: Path
    """Where stdout and stderr go."""

    def output(self) -> str:
        """Return what it has printed."""
        return (self.logs / "stdout").read_text()

    def errors(self) -> str:
        """Return what it has printed as errors."""
        return (self.logs / "stderr").read_text()

    def wait(self) -> int:
        """Return the exit code of a run that ends by itself."""
        code = wait_for_exit(self.process, within_s=RUN_S, what=f"centerlines (printed {self.output()!r})")
        assert "Traceback" not in self.output() + self.errors(), self.output() + self.errors()
        return code

    def actor(self, name: str) -> psutil.Process:
        """Wait for the actor of this name to run; return its process."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = [each for each in self.started.processes() if _title(each).startswith(f"ray::{name}")]
            return bool(found)

        self.wait_until(look, what=f"{name} to start")
        return found[0]

    def wait_until(self, condition: Callable[[], bool], *, what: str) -> None:
        """Wait for what must come to pass while the run goes on."""
        deadline = time.monotonic() + RUN_S
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output()}{self.errors()}"
            assert time.monotonic() < deadline, f"waited more than {RUN_S} s for {what}"
            time.sleep(0.1)

    def progress(self) -> dict[str, dict[str, str]]:
        """Return the rows of progress.csv by tile, each tile once."""
        return read_progress(self.results)

    def lines(self) -> dict[str, bytes]:
        """Return the GeoJSON of each tile."""
        return read_lines(self.results)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def read_progress(results: Path) -> dict[str, dict[str, str]]:
    """Return the rows of progress.csv by tile; none may have two."""
    with (results / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    by_tile = {row["tile_id"]: row for row in rows}
    assert len(by_tile) == len(rows), rows
    assert {row["state"] for row in rows} <= {"done", "empty", "failed"}, rows
    return by_tile


def read_lines(results: Path) -> dict[str, bytes]:
    """Return the GeoJSON of each tile; nothing else may lie beside it."""
    files = list((results / "centerlines").iterdir())
    assert all(file.suffix == ".geojson" for file in files), files
    return {file.stem: file.read_bytes() for file in files}


@contextmanager
def started_run(
    *tiles: Path,
    endpoint: str,
    model: str,
    results: Path,
    options: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[CenterlinesRun]:
    """Start `centerlines run`; the block ends or awaits it. Then no process of it may be left."""
    started = Started()
    logs = results.with_name(f"{results.name}-logs")
    logs.mkdir()
    with (logs / "stdout").open("wb") as output, (logs / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [PROGRAM, "run", *tiles, "--endpoint", endpoint, "--model", model, "--output", results, *options],
            env=os.environ | started.environment | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            # A foreground job has a process group of its own, and Ctrl-C goes to all of it.
            start_new_session=True,
        )
    try:
        yield CenterlinesRun(process, started, results, logs)
        assert process.poll() is not None, "the run goes on after the test"
        left = describe(started.wait_for_none(within_s=STOP_S))
        assert not left, f"centerlines left processes behind:\n{left}"
    finally:
        started.kill()
        process.wait()


def run_centerlines(
    *tiles: Path, endpoint: str, model: str, results: Path, options: tuple[str, ...] = ()
) -> tuple[int, CenterlinesRun]:
    """Let a run come to its end; return its exit code, and it."""
    with started_run(*tiles, endpoint=endpoint, model=model, results=results, options=options) as run:
        return run.wait(), run


def chips_answered(endpoint: str, model: str) -> int:
    """Ask Triton how many chips a model has answered."""
    with triton_grpc.InferenceServerClient(endpoint) as client:
        statistics = client.get_inference_statistics(model, as_json=True)["model_stats"]
    return sum(int(each.get("inference_count", 0)) for each in statistics)


@contextmanager
def own_ray(*, cpus: int, object_store_bytes: int = 500 * 2**20) -> Iterator[None]:
    """Start a Ray in this process, for tests of single actors."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray warns of a change to come that has nothing to do with machines without accelerators.
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            address="local",
            num_cpus=cpus,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            log_to_driver=False,
        )
        try:
            yield
        finally:
            ray.shutdown()
