"""The pipeline on real parts: Triton behind Ray Serve, Ray, and the command as a user starts it."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import rasterio
import shapely
from pyproj import Transformer

from centerlines import UsageError, build_tile_jobs, main
from centerlines.compare_command import compare_tiles
from sample_data import aerial_photo_path
from tests.support.centerlines_run import CenterlinesRun, read_lines, read_progress, run_centerlines
from tests.support.local_endpoint import RunningEndpoint, running_endpoint
from tests.support.models import write_protocol_models
from tests.support.scenes import CRS, scene, tiles
from tests.support.semseg_models import MODELS, write_small_batch_model

MODEL = "batched_semseg_model"
PIXEL_M = 1200 / 3937


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEndpoint]:
    """One endpoint for all tests here."""
    repository = tmp_path_factory.mktemp("models")
    write_protocol_models(repository)
    write_small_batch_model(repository, max_batch_size=8)
    with running_endpoint(MODELS, repository) as running:
        yield running


@pytest.fixture(scope="module")
def scene_folder() -> Path:
    """Four adjoining tiles of 25 chips each."""
    return scene(size=1000, columns=2, rows=2)


@pytest.fixture(scope="module")
def undisturbed(
    endpoint: RunningEndpoint, scene_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> CenterlinesRun:
    """A run in which nothing goes wrong."""
    results = tmp_path_factory.mktemp("undisturbed") / "results"
    code, run = run_centerlines(
        scene_folder, endpoint=endpoint.address, model=MODEL, results=results, options=("--job-id", "job")
    )
    assert code == 0, run.output() + run.errors()
    return run


def test_a_run_writes_lines_progress_record_and_report(undisturbed: CenterlinesRun, scene_folder: Path) -> None:
    """This is what a user gets."""
    names = {tile.stem for tile in tiles(scene_folder)}
    assert set(undisturbed.lines()) == names
    progress = undisturbed.progress()
    assert {(row["job_id"], row["tile_id"], row["state"], row["attempts"]) for row in progress.values()} == {
        ("job", name, "done", "1") for name in names
    }
    record = json.loads((undisturbed.results / "run.json").read_text())
    assert record["exit_code"] == 0
    assert record["totals"]["done"] == len(names)
    report = (undisturbed.results / "report.html").read_text()
    assert all(name in report for name in names)
    assert 'src="http' not in report
    assert {path.name for path in undisturbed.results.iterdir()} == {
        "centerlines",
        "progress.csv",
        "run.json",
        "report.html",
    }
    assert undisturbed.errors() == ""
    assert f"{len(names)}/{len(names)} tiles" in undisturbed.output()


def test_the_lines_are_the_true_ones(undisturbed: CenterlinesRun, scene_folder: Path) -> None:
    """Otherwise the whole chain runs, and what comes out is wrong."""
    found = compare_tiles(
        undisturbed.results, scene_folder / "truth.geojson", list(map(str, tiles(scene_folder))), buffer_m=0.5
    )
    assert found.quality >= 0.98
    assert found.loops_kept.kept == found.loops_kept.total


def _metric(content: bytes) -> list[shapely.LineString]:
    """Return a tile's lines in metres."""
    to_feet = Transformer.from_crs("OGC:CRS84", CRS, always_xy=True)
    return [
        shapely.LineString(
            np.column_stack(to_feet.transform(*np.array(feature["geometry"]["coordinates"]).T)) * PIXEL_M
        )
        for feature in json.loads(content)["features"]
    ]


def _loops(lines: list[shapely.LineString]) -> int:
    return len(shapely.get_parts(shapely.polygonize(lines)))


def test_a_model_that_is_wrong_at_chip_borders_gives_the_same_lines(
    endpoint: RunningEndpoint, undisturbed: CenterlinesRun, scene_folder: Path, tmp_path: Path
) -> None:
    """Otherwise the overlap does not do its work, and lines break or double at every chip border."""
    code, run = run_centerlines(
        scene_folder, endpoint=endpoint.address, model="border_wrong_semseg_model", results=tmp_path / "results"
    )
    assert code == 0, run.output()
    right = undisturbed.lines()
    for tile, content in run.lines().items():
        wrong, expected = _metric(content), _metric(right[tile])
        assert len(wrong) == len(expected)
        assert _loops(wrong) == _loops(expected)
        # Both ways: nothing is missing, nothing is there besides.
        assert shapely.hausdorff_distance(shapely.union_all(wrong), shapely.union_all(expected), 0.1) <= PIXEL_M


def _assert_rfc_7946(content: bytes) -> None:
    collection = json.loads(content)
    assert collection["type"] == "FeatureCollection"
    assert "crs" not in collection
    for feature in collection["features"]:
        assert feature["type"] == "Feature"
        assert {"tile_id", "length_m", "width_m", "confidence"} <= set(feature["properties"])
        assert feature["geometry"]["type"] == "LineString"
        coordinates = np.array(feature["geometry"]["coordinates"])
        assert coordinates.ndim == 2
        assert len(coordinates) >= 2
        assert (np.abs(coordinates[:, :2]) <= (180, 90)).all()


def test_a_real_aerial_photo_goes_through(endpoint: RunningEndpoint, tmp_path: Path) -> None:
    """Otherwise the pipeline works on its own samples alone."""
    photo = aerial_photo_path()
    code, run = run_centerlines(
        photo,
        endpoint=endpoint.address,
        model=MODEL,
        results=tmp_path / "results",
        options=("--bands", "NIR=1,G=2,B=3", "--job-id", "photo"),
    )
    assert code == 0, run.output()
    (row,) = run.progress().values()
    assert row["state"] in {"done", "empty"}
    _assert_rfc_7946(run.lines()[photo.stem])


@dataclass(frozen=True)
class _Wrong:
    """A command line with one thing wrong, and what the user is told."""

    says: str
    tiles: str = "{scene}"
    endpoint: str = "{endpoint}"
    model: str = MODEL
    output: str = "{tmp}/results"
    options: tuple[str, ...] = ()


WRONG = {
    "nothing listens": _Wrong(
        "--endpoint 127.0.0.1:1: nothing answers there as Triton",
        endpoint="127.0.0.1:1",
        options=("--wait-for-endpoint", "1"),
    ),
    "not a Triton": _Wrong(
        "--endpoint {http}: nothing answers there as Triton", endpoint="{http}", options=("--wait-for-endpoint", "1")
    ),
    "no port": _Wrong("--endpoint 'localhost': write HOST:PORT", endpoint="localhost"),
    "unknown model": _Wrong("--model nosuch: the endpoint {endpoint} does not have it", model="nosuch"),
    "unknown version": _Wrong("--model batched_semseg_model: ", options=("--model-version", "7")),
    "other inputs": _Wrong("--model identity_fp32: the pipeline needs a model with", model="identity_fp32"),
    "missing folder": _Wrong("{tmp}/nowhere: no such file or folder", tiles="{tmp}/nowhere"),
    "no tiles": _Wrong("{tmp}/empty: no GeoTIFF", tiles="{tmp}/empty"),
    "output is a file": _Wrong("output {tmp}/file: cannot be made a folder", output="{tmp}/file"),
    "no Ray there": _Wrong("--ray-address 127.0.0.1:1: no Ray cluster", options=("--ray-address", "127.0.0.1:1")),
    "not a Ray address": _Wrong("--ray-address here: no Ray cluster", options=("--ray-address", "here")),
    "batch size": _Wrong("batch size 0: must be at least 1", options=("--batch-size", "0")),
    "bands": _Wrong("--bands 'X=1'", options=("--bands", "X=1")),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    wrong: _Wrong, endpoint: RunningEndpoint, scene_folder: Path, tmp_path: Path
) -> None:
    """Otherwise the user gets a stack trace, or a wait of minutes, for a slip of the pen."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever).start()
        words = {
            "scene": str(scene_folder),
            "endpoint": endpoint.address,
            "http": f"127.0.0.1:{web.server_port}",
            "tmp": str(tmp_path),
        }
        code, run = run_centerlines(
            Path(wrong.tiles.format(**words)),
            endpoint=wrong.endpoint.format(**words),
            model=wrong.model,
            results=Path(wrong.output.format(**words)),
            options=wrong.options,
        )
        web.shutdown()
    assert code == 2
    (line,) = run.errors().splitlines()
    assert line.startswith(f"centerlines: {wrong.says.format(**words)}"), line


def _cut(source: Path, target: Path, *, width: int, height: int) -> None:
    """Write a part of a tile, or several below each other, as a tile of its own."""
    target.parent.mkdir(exist_ok=True)
    with rasterio.open(source) as original:
        pixels = np.tile(original.read(), (1, -(-height // original.height), 1))[:, :height, :width]
        profile = {"driver": "GTiff", "width": width, "height": height, "count": 4, "dtype": "uint8"}
        with rasterio.open(target, "w", crs=original.crs, transform=original.transform, **profile) as dataset:
            dataset.write(pixels)
            dataset.descriptions = original.descriptions


SCRIPT = """
import json, sys, time

import psutil
import ray
from centerlines import build_tile_jobs, main


def title(process):
    try:
        return process.cmdline()[0]
    except (psutil.Error, IndexError):
        return ""


given = json.loads(sys.argv[1])
ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False)
one = build_tile_jobs(given["tiles"][:1], "whole")
first = main(one, "first", given["endpoint"], given["model"], output=given["output"] + "/first")
assert ray.is_initialized(), "main has shut down a Ray that is not its own"

shapes = build_tile_jobs(given["shapes"], "shapes")
small = build_tile_jobs(given["small"], "small", requested_chip_size=128, requested_chip_overlap=0)
large = build_tile_jobs(given["large"], "large", requested_chip_size=512)
second = main(
    shapes + small + large,
    "second",
    given["endpoint"],
    given["small_batches"],
    num_tileloaders=2,
    num_postprocessors=2,
    output=given["output"] + "/second",
)
assert ray.is_initialized()
deadline = time.monotonic() + 60
while left := [name for each in psutil.Process().children(recursive=True) if "Actor" in (name := title(each))]:
    assert time.monotonic() < deadline, f"actors live on after main: {left}"
    time.sleep(0.1)
print(json.dumps({"codes": [first.exit_code, second.exit_code], "states": [row.state for row in second.rows]}))
ray.shutdown()
"""


def test_the_python_api_runs_jobs_of_all_shapes_in_a_ray_of_the_caller(
    endpoint: RunningEndpoint, undisturbed: CenterlinesRun, scene_folder: Path, tmp_path: Path
) -> None:
    """Otherwise notebooks and Ray jobs cannot use the package, or odd tiles and several actors hang it."""
    whole = tiles(scene_folder)
    shapes = {
        "one_pixel": (1, 1),
        "one_row": (300, 1),
        "less_than_a_chip": (255, 100),
        "tall": (300, 5000),
        "a/same": (257, 256),
        "b/same": (400, 300),
    }
    for name, (width, height) in shapes.items():
        _cut(whole[0], tmp_path / f"{name}.tif", width=width, height=height)
    for name in ("small_chips", "large_chips"):
        shutil.copy(whole[1], tmp_path / f"{name}.tif")
    arguments = {
        "endpoint": endpoint.address,
        "model": MODEL,
        "small_batches": "small_batch_semseg_model",
        "output": str(tmp_path),
        "tiles": list(map(str, whole)),
        "shapes": [str(tmp_path / f"{name}.tif") for name in shapes],
        "small": [str(tmp_path / "small_chips.tif")],
        "large": [str(tmp_path / "large_chips.tif")],
    }
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    finished = subprocess.run(
        [sys.executable, script, json.dumps(arguments)],
        env=os.environ | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    answer = json.loads(finished.stdout.splitlines()[-1])
    assert answer["codes"] == [0, 0]
    assert read_lines(tmp_path / "first") == {whole[0].stem: undisturbed.lines()[whole[0].stem]}
    progress = read_progress(tmp_path / "second")
    names = {name.replace("/", "-") for name in shapes} | {"small_chips", "large_chips"}
    assert set(progress) == names
    assert progress["one_pixel"]["state"] == "empty"
    found = read_lines(tmp_path / "second")
    assert set(found) == names
    # The model looks at each pixel by itself, so the cutting changes nothing.
    for name in ("small_chips", "large_chips"):
        one, other = _metric(found[name]), _metric(undisturbed.lines()[whole[1].stem])
        assert shapely.hausdorff_distance(shapely.union_all(one), shapely.union_all(other), 0.1) <= PIXEL_M


def test_two_jobs_of_one_name_are_refused(tmp_path: Path) -> None:
    """Otherwise the lines of the one tile silently take the place of the other's."""
    jobs = build_tile_jobs(["a/same.tif"], "first") + build_tile_jobs(["b/same.tif"], "second")
    with pytest.raises(UsageError, match="tile same: 2 jobs have this id"):
        main(jobs, "run", "127.0.0.1:1", MODEL, output=tmp_path)


def test_a_second_run_gives_the_same_bytes(
    endpoint: RunningEndpoint, undisturbed: CenterlinesRun, scene_folder: Path, tmp_path: Path
) -> None:
    """Otherwise two runs cannot be compared; several actors and small batches must change nothing either."""
    code, run = run_centerlines(
        scene_folder,
        endpoint=endpoint.address,
        model=MODEL,
        results=tmp_path / "results",
        options=("--batch-size", "7", "--loaders", "2", "--postprocessors", "2"),
    )
    assert code == 0, run.output()
    assert run.lines() == undisturbed.lines()
