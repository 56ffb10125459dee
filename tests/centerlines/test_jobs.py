"""Which jobs are made of which paths."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from centerlines.errors import UsageError
from centerlines.jobs import TileJob, build_tile_jobs

ODD_PATHS = [
    "a.tif",
    "a.tiff",
    "a.TIF",
    "a-2.tif",
    "./a.tif",
    "/a.tif",
    "../a.tif",
    "b/a.tif",
    "b-a.tif",
    "c//a.tif",
    ".tif",
    "..tif",
    "...",
    ".hidden.tif",
    "/",
    "scene.v2.final.tif",
    "with space & #1?%20+.tif",
    "ü/é漢.tif",
    "line\nbreak\ttab\r.tif",
    "line_break_tab_.tif",
    "not text \udce9.tif",
    "x" * 300 + ".tif",
    "x" * 301 + ".tif",
    "deep/" * 60 + "x" * 180 + ".tif",
    "deep/" * 61 + "x" * 180 + ".tif",
    "é" * 150 + ".tif",
]


def ids(paths: Sequence[str]) -> list[str]:
    """The tile ids that the paths get."""
    return [job.tile_id for job in build_tile_jobs(paths, "job")]


def test_a_job_has_the_documented_defaults() -> None:
    """Callers rely on the sizes that the model was trained with, without naming them."""
    (job,) = build_tile_jobs(["folder/tile_1.tif"], "newark")
    assert job == TileJob("folder/tile_1.tif", "tile_1", "newark")
    assert (job.requested_chip_size, job.requested_chip_overlap) == (256, 32)
    assert (job.use_pseudo_color_nir, job.target_format) == (True, "NIR-GB")
    assert list(job.target_model_input_size) == [3, 256, 256]
    assert job.bands is None
    assert job.key == ("newark", "tile_1")


def test_settings_reach_every_job_in_the_order_of_the_paths() -> None:
    """A setting that is dropped for some tiles gives results that do not fit together."""
    jobs = build_tile_jobs(
        ["b.tif", "a.tif"],
        "job",
        requested_chip_size=128,
        requested_chip_overlap=16,
        use_pseudo_color_nir=False,
        target_model_input_size=[3, 128, 128],
        bands={"NIR": 4},
    )
    assert [job.tile_id for job in jobs] == ["b", "a"]
    for job in jobs:
        assert (job.requested_chip_size, job.requested_chip_overlap) == (128, 16)
        assert job.target_model_input_size == (3, 128, 128)
        assert job.use_pseudo_color_nir is False
        assert job.bands == {"NIR": 4}


def test_no_paths_give_no_jobs() -> None:
    """A program that filters its tiles may be left with none."""
    assert build_tile_jobs([], "job") == []


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["x/a.tif", "y/b.tif"], ["a", "b"]),
        (["x/a.tif", "y/a.tif", "y/b.tif"], ["x-a", "y-a", "b"]),
        (["2023/x/a.tif", "2024/x/a.tif"], ["2023-x-a", "2024-x-a"]),
        (["x/a.tif", "a.tif"], ["x-a", "a"]),
        (["a.tif", "a.tiff"], ["a", "a-2"]),
        (["a.tif", "a.tiff", "a-2.tif"], ["a", "a-3", "a-2"]),
        (["x/y.tif", "z/y.tif", "x-y.tif"], ["x-y", "z-y", "x-y-2"]),
        (["scene.v2.tif"], ["scene.v2"]),
        ([".hidden.tif"], ["hidden"]),
    ],
)
def test_a_tile_is_named_by_as_little_of_its_path_as_tells_it_apart(paths: list[str], expected: list[str]) -> None:
    """People look for a tile's result by the name they know it by."""
    assert ids(paths) == expected


def test_odd_paths_get_distinct_ids_that_can_be_the_names_of_files(tmp_path: Path) -> None:
    """Two tiles with one id overwrite each other's lines; an id with a slash leaves the output folder."""
    names = ids(ODD_PATHS)
    assert len(set(names)) == len(ODD_PATHS)
    for name in names:
        assert name.isprintable()
        assert name not in {"", ".", ".."}
        assert not name.startswith(".")
        (tmp_path / f".{name}.geojson.4194304.partial").touch()
        (tmp_path / f"{name}.geojson").touch()
    assert len(list(tmp_path.iterdir())) == 2 * len(ODD_PATHS)


def test_ids_stay_the_same_from_run_to_run() -> None:
    """A second run over the same tiles must write the same files."""
    assert ids(ODD_PATHS) == ids(ODD_PATHS)


def test_ten_thousand_paths_take_no_time() -> None:
    """The largest runs have so many tiles; a loop over pairs of them would take minutes."""
    paths = [f"county/{block % 100}/deep/er/{block // 2}.tif" for block in range(10_000)]
    paths += [f"{'a/' * (left + 1)}a{'-a' * (20 - left)}.tif" for left in range(20)]
    started = time.process_time()
    assert len(set(ids(paths))) == len(paths)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("refused", "accepted", "message"),
    [
        ({"requested_chip_size": 15, "requested_chip_overlap": 0}, {"requested_chip_size": 16}, "chip size 15"),
        ({"requested_chip_size": -256}, {"requested_chip_size": 256}, "chip size -256"),
        ({"requested_chip_overlap": -1}, {"requested_chip_overlap": 0}, "chip overlap -1"),
        ({"requested_chip_overlap": 129}, {"requested_chip_overlap": 128}, "chip overlap 129.*128"),
        ({"target_model_input_size": (3, 256, 255)}, {"target_model_input_size": (3, 256, 256)}, r"\[3, 256, 255\]"),
        ({"target_model_input_size": (4, 256, 256)}, {"target_model_input_size": [3, 256, 256]}, r"\[4, 256, 256\]"),
        ({"target_format": "RGB"}, {"target_format": "NIR-GB"}, "'RGB'.*'NIR-GB'"),
    ],
)
def test_what_does_not_fit_is_refused_and_its_neighbour_is_not(
    refused: dict[str, Any], accepted: dict[str, Any], message: str
) -> None:
    """A wrong size is told before anything has started, with the value and the way out."""
    with pytest.raises(UsageError, match=message):
        build_tile_jobs(["a.tif"], "job", **refused)
    small: dict[str, Any] = {"requested_chip_overlap": 8} if accepted.get("requested_chip_size") == 16 else {}
    assert len(build_tile_jobs(["a.tif"], "job", **accepted, **small)) == 1


@pytest.mark.parametrize("paths", [["x/a.tif", "b.tif", "x/a.tif"], ["a.tif", ""]])
def test_a_path_that_is_empty_or_given_twice_is_refused(paths: list[str]) -> None:
    """The same tile twice would be two tiles that write one file."""
    with pytest.raises(UsageError, match=r"tile (x/a.tif|'')"):
        build_tile_jobs(paths, "job")


@pytest.mark.parametrize("job_id", ["two\nlines", "carriage\rreturn", "\udce9"])
def test_a_job_id_that_would_break_a_table_is_refused(job_id: str) -> None:
    """It stands in every row of progress.csv."""
    with pytest.raises(UsageError, match="job id"):
        build_tile_jobs(["a.tif"], job_id)
    assert build_tile_jobs(["a.tif"], "Newark, 2024: \"é\" '#1'")[0].job_id


def test_an_id_is_never_longer_than_a_file_name_may_be() -> None:
    """Keys in a bucket may be four times as long as a file name."""
    assert max(len(name.encode()) for name in ids(ODD_PATHS)) <= 200
    assert ids(["y" * 200 + ".tif"]) == ["y" * 200]
    assert len(ids(["y" * 201 + ".tif"])[0]) == 200
