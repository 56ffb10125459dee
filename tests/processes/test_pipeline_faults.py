"""What becomes of a run when parts of it, its tiles or its endpoint fail: real processes, really killed."""

import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import rasterio
import ray

import centerlines
from centerlines import build_tile_jobs
from centerlines.actors import InputQueueActor, RunSettings
from centerlines.controller import ControllerActor
from centerlines.storage import TileSource
from tests.support.centerlines_run import (
    CenterlinesRun,
    chips_answered,
    own_ray,
    read_lines,
    run_centerlines,
    started_run,
)
from tests.support.local_endpoint import RunningTriton, running_endpoint, running_triton
from tests.support.scenes import scene, tiles
from tests.support.semseg_models import MODELS, write_particular_model, write_slow_model

# Several requests a tile, so that a fault meets a run of which some is done and some is not.
OPTIONS = ("--batch-size", "8", "--job-id", "job")
CHIPS = 100


@pytest.fixture(scope="module")
def scene_folder() -> Path:
    """Four adjoining tiles of 25 chips each."""
    return scene(size=1000, columns=2, rows=2)


@pytest.fixture(scope="module")
def slow_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with one model that answers slowly, and two that do not like white chips."""
    repository = tmp_path_factory.mktemp("models")
    write_slow_model(repository, delay_s=0.25)
    for refuses in (False, True):
        write_particular_model(repository, refuses=refuses)
    return repository


SLOW = "slow_semseg_model"


@pytest.fixture(scope="module")
def triton(slow_repository: Path) -> Iterator[RunningTriton]:
    """One Triton for the faults that are not its own."""
    with running_triton(MODELS, slow_repository) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(
    scene_folder: Path, triton: RunningTriton, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The GeoJSON of each tile from a run in which nothing went wrong."""
    results = tmp_path_factory.mktemp("undisturbed") / "results"
    code, run = run_centerlines(
        scene_folder, endpoint=triton.address, model="batched_semseg_model", results=results, options=OPTIONS
    )
    assert code == 0, run.output() + run.errors()
    return run.lines()


def _wait_until_answers_come(run: CenterlinesRun, endpoint: str, *, chips: int) -> Callable[[], None]:
    """Return a function that waits until the slow model has answered so many chips of this run."""
    before = chips_answered(endpoint, SLOW)
    return lambda: run.wait_until(
        lambda: chips_answered(endpoint, SLOW) >= before + chips, what=f"{chips} chips have been answered"
    )


@pytest.mark.parametrize("actor", ["TileLoaderActor", "InputQueueActor", "InferenceDispatcherActor", "AggregatorActor"])
def test_a_run_survives_the_death_of_an_actor_that_works_on_chips(
    actor: str, scene_folder: Path, triton: RunningTriton, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Otherwise one process that the kernel kills for its memory costs a night's run, or hangs it."""
    with started_run(
        scene_folder, endpoint=triton.address, model=SLOW, results=tmp_path / "results", options=OPTIONS
    ) as run:
        _wait_until_answers_come(run, triton.address, chips=1)()
        run.actor(actor).kill()
        assert run.wait() == 0, run.output()
    assert run.lines() == undisturbed
    progress = run.progress()
    assert {row["state"] for row in progress.values()} == {"done"}
    assert any(int(row["attempts"]) > 1 for row in progress.values()), "the actor was killed when it had no work"


@pytest.mark.parametrize("actor", ["PostProcessingActor", "CenterlineWorker"])
def test_a_run_survives_the_death_of_an_actor_that_works_on_lines(
    actor: str, scene_folder: Path, triton: RunningTriton, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Otherwise one process that the kernel kills for its memory costs a night's run, or hangs it."""
    with started_run(
        scene_folder, endpoint=triton.address, model=SLOW, results=tmp_path / "results", options=OPTIONS
    ) as run:
        wait_for_chips = _wait_until_answers_come(run, triton.address, chips=CHIPS)
        process = run.actor(actor)
        # Held, so that it cannot be through with its work before it is killed.
        process.suspend()
        wait_for_chips()
        process.kill()
        assert run.wait() == 0, run.output()
    assert run.lines() == undisturbed
    assert {row["state"] for row in run.progress().values()} == {"done"}


def test_a_run_ends_with_the_reason_when_an_actor_cannot_be_started_again(
    scene_folder: Path, triton: RunningTriton, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Otherwise the run waits for ever for an actor that Ray has given up."""
    package = tmp_path / "package/centerlines"
    shutil.copytree(Path(centerlines.__file__).parent, package)
    with started_run(
        scene_folder,
        endpoint=triton.address,
        model=SLOW,
        results=tmp_path / "results",
        options=OPTIONS,
        environment={"PYTHONPATH": str(package.parent)},
    ) as run:
        _wait_until_answers_come(run, triton.address, chips=1)()
        (package / "storage.py").write_text("raise ImportError('this file is damaged')\n")
        run.actor("TileLoaderActor").kill()
        assert run.wait() == 1
    progress = run.progress()
    assert set(progress) == set(undisturbed)
    for row in progress.values():
        assert row["state"] == "done" or re.fullmatch(
            r".*TileLoaderActor.* cannot be started: ImportError: this file is damaged", row["reason"]
        ), row


def test_the_death_of_the_controller_ends_the_run_with_one_clear_line(
    scene_folder: Path, triton: RunningTriton, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Otherwise the command hangs or shows a stack trace, and tiles have no final state."""
    with started_run(
        scene_folder, endpoint=triton.address, model=SLOW, results=tmp_path / "results", options=OPTIONS
    ) as run:
        _wait_until_answers_come(run, triton.address, chips=1)()
        run.actor("ControllerActor").kill()
        assert run.wait() == 1
    assert run.errors() == "the controller died or hangs; run again\n"
    progress = run.progress()
    assert len(progress) == len(undisturbed)
    assert {row["reason"] for row in progress.values() if row["state"] == "failed"} == {
        "the controller died or hangs; run again"
    }
    assert run.lines().items() <= undisturbed.items()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda signum: signum.name)
def test_a_run_that_is_stopped_leaves_no_process_behind(
    signum: signal.Signals, scene_folder: Path, triton: RunningTriton, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Otherwise every Ctrl-C leaves a Ray that holds memory, and half of a file."""
    with started_run(
        scene_folder, endpoint=triton.address, model=SLOW, results=tmp_path / "results", options=OPTIONS
    ) as run:
        run.wait_until(lambda: (run.results / "progress.csv").exists(), what="progress.csv is there")
        _wait_until_answers_come(run, triton.address, chips=1)()
        if signum == signal.SIGINT:
            # The terminal sends it to the whole group.
            os.killpg(run.process.pid, signum)
        else:
            run.process.send_signal(signum)
        code = run.wait()
    assert code == 128 + signum
    assert run.errors() == f"centerlines: stopped by {signum.name}; progress.csv tells which tiles have ended\n"
    assert "***" not in run.output()
    assert {row["state"] for row in run.progress().values()} <= {"done"}
    assert run.lines().items() <= undisturbed.items()


def _write_like(source: Path, target: Path, *, crs: bool = True, bands: int = 4, blank: bool = False) -> None:
    with rasterio.open(source) as original:
        profile = {"driver": "GTiff", "width": 300, "height": 300, "count": bands, "dtype": "uint8"}
        profile |= {"transform": original.transform, "crs": original.crs if crs else None}
        window = rasterio.windows.Window(0, 0, 300, 300)
        pixels = original.read(list(range(1, bands + 1)), window=window)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with rasterio.open(target, "w", nodata=0 if blank else None, **profile) as dataset:
            dataset.write(0 * pixels if blank else pixels)
            dataset.descriptions = ("red", "green", "blue", "nir")[:bands]


def test_tiles_that_cannot_be_read_fail_with_their_reason_and_the_others_go_on(
    scene_folder: Path, triton: RunningTriton, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Otherwise one bad file among thousands stops the run, or is silently without lines."""
    folder = tmp_path / "tiles"
    folder.mkdir()
    good = tiles(scene_folder)[:2]
    for tile in good:
        shutil.copy(tile, folder)
    whole = good[0].read_bytes()
    (folder / "a_truncated.tif").write_bytes(whole[: len(whole) // 2])
    (folder / "b_empty_file.tif").write_bytes(b"")
    (folder / "c_text.tif").write_text("not an image\n")
    _write_like(good[0], folder / "d_no_crs.tif", crs=False)
    _write_like(good[0], folder / "e_three_bands.tif", bands=3)
    _write_like(good[0], folder / "f_blank.tif", blank=True)
    stale = tmp_path / "results/centerlines/d_no_crs.geojson"
    stale.parent.mkdir(parents=True)
    stale.write_text("the lines of an earlier run")

    code, run = run_centerlines(
        folder, endpoint=triton.address, model="batched_semseg_model", results=tmp_path / "results", options=OPTIONS
    )
    assert code == 1
    assert run.errors() == ""
    progress = run.progress()
    assert {tile: row["state"] for tile, row in progress.items()} == {
        "a_truncated": "failed",
        "b_empty_file": "failed",
        "c_text": "failed",
        "d_no_crs": "failed",
        "e_three_bands": "failed",
        "f_blank": "empty",
        **{tile.stem: "done" for tile in good},
    }
    for name, words in {
        "a_truncated": "failed 3 times, the last time: cannot be read",
        "b_empty_file": "failed 3 times, the last time: cannot be read",
        "c_text": "failed 3 times, the last time: cannot be read",
        "d_no_crs": "has no coordinate reference system",
        "e_three_bands": "NIR-GB needs a NIR band",
    }.items():
        assert progress[name]["reason"].startswith(words)
        assert re.search(rf"^failed: {name}: {re.escape(progress[name]['reason'])}$", run.output(), re.MULTILINE)
    lines = run.lines()
    assert {tile.stem: lines[tile.stem] for tile in good} == {tile.stem: undisturbed[tile.stem] for tile in good}
    assert set(lines) == {"f_blank", *(tile.stem for tile in good)}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("nan_semseg_model", "the model answered NaN in "),
        ("refusing_semseg_model", "the endpoint refused a batch of chips: INTERNAL: white is too bright"),
    ],
)
def test_a_tile_that_the_model_cannot_answer_fails_alone(
    model: str, reason: str, scene_folder: Path, triton: RunningTriton, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Otherwise the tiles whose chips share a request with it fail with it, or the whole run ends."""
    folder = tmp_path / "tiles"
    folder.mkdir()
    for tile in tiles(scene_folder):
        shutil.copy(tile, folder)
    with rasterio.open(tiles(scene_folder)[0]) as original:
        white = {"driver": "GTiff", "width": 300, "height": 300, "count": 4, "dtype": "uint8"}
        white |= {"transform": original.transform, "crs": original.crs}
    with rasterio.open(folder / "a_white.tif", "w", **white) as dataset:
        dataset.write(np.full((4, 300, 300), 255, dtype=np.uint8))
        dataset.descriptions = ("red", "green", "blue", "nir")

    # Batches large enough that several tiles share one.
    code, run = run_centerlines(folder, endpoint=triton.address, model=model, results=tmp_path / "results")
    assert code == 1
    progress = run.progress()
    assert progress.pop("a_white")["reason"].startswith(f"failed 3 times, the last time: {reason}")
    assert {row["state"] for row in progress.values()} == {"done"}
    assert {row["attempts"] for row in progress.values()} == {"1"}
    assert run.lines() == undisturbed


def test_a_run_heals_when_triton_dies_and_comes_back(
    scene_folder: Path, slow_repository: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Otherwise a restart of the server's pod costs the run."""
    with running_triton(slow_repository) as first:
        port = int(first.address.rpartition(":")[2])
        with started_run(
            scene_folder, endpoint=first.address, model=SLOW, results=tmp_path / "results", options=OPTIONS
        ) as run:
            _wait_until_answers_come(run, first.address, chips=1)()
            first.process.kill()
            first.process.wait()
            with running_triton(slow_repository, grpc_port=port):
                assert run.wait() == 0, run.output()
    assert run.lines() == undisturbed


def test_a_run_ends_with_the_reason_when_the_endpoint_is_gone_for_good(
    scene_folder: Path, slow_repository: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Otherwise the run waits for ever, or fails each tile by itself over hours."""
    with (
        running_endpoint(slow_repository, exit_code=1) as endpoint,
        started_run(
            scene_folder,
            endpoint=endpoint.address,
            model=SLOW,
            results=tmp_path / "results",
            options=(*OPTIONS, "--wait-for-endpoint", "3"),
        ) as run,
    ):
        _wait_until_answers_come(run, endpoint.address, chips=1)()
        psutil.Process(endpoint.triton_pid).kill()
        assert run.wait() == 1
        assert endpoint.wait_for_exit() == 1
    assert run.errors() == ""
    progress = run.progress()
    assert set(progress) == set(undisturbed)
    failed = [row for row in progress.values() if row["state"] == "failed"]
    assert failed
    assert all("the endpoint was unavailable for 3 s" in row["reason"] for row in failed), failed
    assert run.lines().items() <= undisturbed.items()


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A Ray that the tests themselves have started."""
    with own_ray(cpus=4):
        yield


@pytest.mark.usefixtures("ray_here")
def test_chips_do_not_go_to_a_reader_that_has_been_replaced() -> None:
    """Otherwise a dispatcher that died while it waited for chips takes some along, and their tile hangs for ever."""
    queue = InputQueueActor.remote(100)  # type: ignore[attr-defined]
    ray.get(queue.attach.remote(1))
    of_the_dead = queue.get.remote(1, 8)
    ray.get(queue.attach.remote(2))
    assert ray.get(of_the_dead) == []
    assert ray.get(queue.get.remote(1, 8)) == []


@pytest.mark.usefixtures("ray_here")
def test_an_actor_that_hangs_is_replaced(
    scene_folder: Path, triton: RunningTriton, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Otherwise a run that waits for a stuck process never ends."""
    (tmp_path / "centerlines").mkdir()
    settings = RunSettings(
        endpoint=triton.address,
        model_name=SLOW,
        model_version="",
        batch_size=8,
        threshold=0.5,
        output=str(tmp_path),
        patience_s=60,
        pictures=0,
        source=TileSource(),
        hung_after_s=5,
    )
    jobs = build_tile_jobs(list(map(str, tiles(scene_folder))), "job")
    before = chips_answered(triton.address, SLOW)
    controller = ControllerActor.options(num_cpus=0).remote(settings, jobs, loaders=1, postprocessors=1)  # type: ignore[attr-defined]
    running = controller.run.remote()
    while chips_answered(triton.address, SLOW) == before:
        assert not ray.wait([running], timeout=0.1)[0]
    hung = [
        process
        for process in psutil.Process().children(recursive=True)
        if any(name in process.cmdline()[0] for name in ("ray::InferenceDispatcherActor", "ray::PostProcessingActor"))
    ]
    assert len(hung) == 2
    for process in hung:
        process.suspend()
    ray.get(running, timeout=240)
    rows = ray.get(controller.rows.remote())
    ray.kill(controller)
    assert [row.state for row in rows] == ["done"] * len(jobs)
    assert read_lines(tmp_path) == undisturbed
