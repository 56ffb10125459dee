"""What a run holds in memory, however many tiles it has."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import rasterio
import ray
from ray._private.internal_api import memory_summary

from centerlines import build_tile_jobs
from centerlines.actors import RunSettings
from centerlines.controller import ControllerActor
from centerlines.storage import TileSource
from tests.support.centerlines_run import own_ray, started_run
from tests.support.local_endpoint import RunningTriton, running_triton
from tests.support.scenes import scene, tiles
from tests.support.semseg_models import MODELS, write_slow_model


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """One Triton, whose slow model is the bottleneck of a run."""
    repository = tmp_path_factory.mktemp("models")
    write_slow_model(repository, delay_s=1)
    with running_triton(MODELS, repository) as running:
        yield running


def _proportional_set_size(process: psutil.Process) -> int:
    """Return a process's memory in bytes; what it shares with n processes counts by an n-th."""
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB$", rollup, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def _peak_bytes(folder: Path, triton: RunningTriton, results: Path) -> int:
    """Return the most that all processes of a run held together."""
    peak = 0
    with started_run(folder, endpoint=triton.address, model="slow_semseg_model", results=results) as run:
        while run.process.poll() is None:
            peak = max(peak, sum(map(_proportional_set_size, run.started.processes())))
            time.sleep(0.2)
        assert run.wait() == 0, run.output()
    assert {row["state"] for row in run.progress().values()} == {"done"}
    return peak


def test_sixteen_tiles_need_hardly_more_memory_than_four(triton: RunningTriton, tmp_path: Path) -> None:
    """Otherwise a thousand tiles fill any machine, because loaders are faster than the model."""
    four, sixteen = tmp_path / "four", tmp_path / "sixteen"
    for folder, copies in ((four, 1), (sixteen, 4)):
        folder.mkdir()
        for tile in tiles(scene(size=2000, columns=2, rows=2)):
            for number in range(copies):
                os.link(tile, folder / f"{tile.stem}_{number}.tif")
    few = _peak_bytes(four, triton, tmp_path / "results-four")
    many = _peak_bytes(sixteen, triton, tmp_path / "results-sixteen")
    assert many <= 1.3 * few, f"{few / 1e6:.0f} MB for 4 tiles, {many / 1e6:.0f} MB for 16"


def test_tiles_that_have_ended_leave_no_pixels_in_the_object_store(triton: RunningTriton, tmp_path: Path) -> None:
    """Otherwise a long run fills the object store, and then the disk."""
    with rasterio.open(tiles(scene(size=1000, columns=2, rows=2))[0]) as original:
        pixels = original.read(window=rasterio.windows.Window(0, 0, 64, 64))
        profile = {"driver": "GTiff", "width": 64, "height": 64, "count": 4, "dtype": "uint8"}
        profile |= {"crs": original.crs, "transform": original.transform}
        descriptions = original.descriptions
    paths = [tmp_path / f"{number}.tif" for number in range(200)]
    for path in paths:
        with rasterio.open(path, "w", **profile) as dataset:
            dataset.write(pixels)
            dataset.descriptions = descriptions
    (tmp_path / "centerlines").mkdir()
    settings = RunSettings(
        endpoint=triton.address,
        model_name="batched_semseg_model",
        model_version="",
        batch_size=200,
        threshold=0.5,
        output=str(tmp_path),
        patience_s=60,
        pictures=0,
        source=TileSource(),
    )
    with own_ray(cpus=4, object_store_bytes=200 * 2**20):
        jobs = build_tile_jobs(list(map(str, paths)), "job")
        controller = ControllerActor.options(num_cpus=0).remote(settings, jobs, loaders=1, postprocessors=1)  # type: ignore[attr-defined]
        ray.get(controller.run.remote(), timeout=300)
        summary = ray.get(controller.summary.remote())
        assert summary.ended == len(paths)
        assert summary.states["failed"] == 0
        # Other programs may have a Ray of their own on this machine.
        address = ray.get_runtime_context().gcs_address
        held = memory_summary(address, stats_only=True)  # type: ignore[no-untyped-call]
        ray.kill(controller)
    needed = re.search(r"([\d.]+)% needed", held)
    assert needed, held
    # Chips, valid pixels and probabilities of all tiles would be a third of it.
    assert float(needed[1]) < 5, held
