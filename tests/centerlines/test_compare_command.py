"""`centerlines compare` on made-up tiles whose answers can be counted by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyproj
import pytest
import rasterio
from affine import Affine

from centerlines.cli import run
from centerlines.compare_command import Comparison, compare_tiles
from centerlines.errors import UsageError

US_FOOT_M = 1200 / 3937
WEST_FT, NORTH_FT = 500_000.0, 550_000.0
SIZE = 600
TO_DEGREES = pyproj.Transformer.from_crs("EPSG:3424", "EPSG:4326", always_xy=True)

Lines = Sequence[Sequence[tuple[float, float]]]
# In feet from the north-west corner of the first tile, eastwards and southwards.
STREETS: Lines = [[(100, 0), (100, 600)], [(500, 0), (500, 600)]]
BLOCK: Lines = [[(200, 200), (400, 200), (400, 400), (200, 400), (200, 200)]]


def shifted(lines: Lines, metres: float) -> Lines:
    """The lines, moved to the east."""
    return [[(x + metres / US_FOOT_M, y) for x, y in line] for line in lines]


def write_tile(folder: Path, name: str = "a.tif", *, column: int = 0, crs: str | None = "EPSG:3424") -> str:
    """Write a tile of 600 x 600 feet."""
    folder.mkdir(parents=True, exist_ok=True)
    place = Affine(1, 0, WEST_FT + column * SIZE, 0, -1, NORTH_FT)
    with rasterio.open(
        folder / name, "w", driver="GTiff", width=SIZE, height=SIZE, count=1, dtype="uint8", crs=crs, transform=place
    ) as dataset:
        dataset.write(np.zeros((1, SIZE, SIZE), np.uint8))
    return str(folder / name)


def write_lines(path: Path, lines: Lines) -> Path:
    """Write lines as GeoJSON, through PROJ alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    features = [
        {
            "type": "Feature",
            "properties": {},
            "geometry": {
                "type": "LineString",
                "coordinates": [TO_DEGREES.transform(WEST_FT + x, NORTH_FT - y) for x, y in line],
            },
        }
        for line in lines
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return path


def compared(folder: Path, found: Lines, truth: Lines, *, buffer_m: float = 0.5) -> Comparison:
    """Compare on one tile."""
    tile = write_tile(folder / "tiles")
    write_lines(folder / "results/centerlines/a.geojson", found)
    return compare_tiles(folder / "results", write_lines(folder / "truth.geojson", truth), [tile], buffer_m=buffer_m)


def test_the_truth_compared_with_itself_is_perfect(tmp_path: Path) -> None:
    """Lengths are those of the ground in metres, although the tile is in US survey feet."""
    result = compared(tmp_path, [*STREETS, *BLOCK], [*STREETS, *BLOCK])
    assert (result.completeness, result.correctness, result.quality) == pytest.approx((1, 1, 1))
    assert result.found_length_m == result.truth_length_m == pytest.approx(2000 * US_FOOT_M, rel=2e-4)
    assert (result.loops_kept.kept, result.loops_kept.total) == (1, 1)
    assert result.tiles[0].found == result.tiles[0].truth
    assert (result.tiles[0].found.components, result.tiles[0].found.dead_ends, result.tiles[0].found.loops) == (3, 0, 1)


@pytest.mark.parametrize(("shift_m", "quality"), [(0.4, 1.0), (-0.4, 1.0), (0.6, 0.0), (-0.6, 0.0)])
def test_the_buffer_is_in_metres(tmp_path: Path, shift_m: float, quality: float) -> None:
    """0.6 m are 2 feet: a buffer in feet would let them pass."""
    assert compared(tmp_path, shifted(STREETS, shift_m), STREETS).quality == pytest.approx(quality, abs=1e-3)


def test_completeness_and_correctness_are_weighted_by_length_over_tiles(tmp_path: Path) -> None:
    """A tile with one short line must not count as much as one full of streets."""
    tiles = [write_tile(tmp_path / "tiles", name, column=column) for column, name in enumerate(("a.tif", "b.tif"))]
    east: Lines = [[(900, 100), (900, 200)]]
    write_lines(tmp_path / "results/centerlines/a.geojson", STREETS[:1])
    write_lines(tmp_path / "results/centerlines/b.geojson", [*east, [(1000, 100), (1000, 200)]])
    truth = write_lines(tmp_path / "truth.geojson", [*STREETS, *east])
    result = compare_tiles(tmp_path / "results", truth, tiles, buffer_m=0.5)
    assert result.completeness == pytest.approx(700 / 1300, abs=2e-3)
    assert result.correctness == pytest.approx(700 / 800, abs=2e-3)
    assert result.quality == pytest.approx(700 / (1300 + 800 - 700), abs=2e-3)
    assert len(result.tiles) == 2


def test_truth_of_other_places_does_not_count(tmp_path: Path) -> None:
    """One truth file serves all tiles of a scene."""
    far: Lines = [[(5000, 0), (5000, 600)]]
    result = compared(tmp_path, STREETS, [*STREETS, *far])
    assert result.quality == pytest.approx(1)
    assert result.truth_length_m == pytest.approx(1200 * US_FOOT_M, rel=2e-4)


def test_a_tile_without_sidewalks_is_no_error(tmp_path: Path) -> None:
    """Fields and water are ordinary."""
    nothing = compared(tmp_path, [], [])
    assert (nothing.completeness, nothing.correctness, nothing.loops_kept.total) == (1, 1, 0)
    missed = compared(tmp_path, [], STREETS)
    assert (missed.completeness, missed.correctness, missed.quality) == (0, 1, 0)
    made_up = compared(tmp_path, STREETS, [])
    assert (made_up.completeness, made_up.correctness, made_up.quality) == (1, 0, 0)


def test_multi_part_lines_and_heights_are_read(tmp_path: Path) -> None:
    """Truth comes out of other programs."""
    tile = write_tile(tmp_path / "tiles")
    write_lines(tmp_path / "results/centerlines/a.geojson", STREETS)
    plain = json.loads((tmp_path / "results/centerlines/a.geojson").read_text())
    parts = [[[*position, 12.5] for position in f["geometry"]["coordinates"]] for f in plain["features"]]
    feature = {"type": "Feature", "geometry": {"type": "MultiLineString", "coordinates": parts}, "properties": {}}
    truth = tmp_path / "truth.geojson"
    truth.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    assert compare_tiles(tmp_path / "results", truth, [tile], buffer_m=0.5).quality == pytest.approx(1)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"no json", b"null", b"[]", b"{}", b"\xff\xfe", b'{"features": [null]}', b'{"features": [{}]}'),
        b'{"features": [{"geometry": null}]}',
        b'{"features": [{"geometry": {"type": "Point", "coordinates": [1, 2]}}]}',
        b'{"features": [{"geometry": {"type": "LineString", "coordinates": [[1, 2]]}}]}',
        b'{"features": [{"geometry": {"type": "LineString", "coordinates": []}}]}',
        b'{"features": [{"geometry": {"type": "LineString", "coordinates": [[1, 2], ["x", "y"]]}}]}',
    ],
)
def test_a_file_that_holds_no_lines_is_named(tmp_path: Path, content: bytes) -> None:
    """Truth and results are easily mixed up with other files."""
    truth = tmp_path / "truth.geojson"
    truth.write_bytes(content)
    with pytest.raises(UsageError, match=r"truth\.geojson: cannot be read as GeoJSON of lines") as caught:
        compare_tiles(tmp_path, truth, [write_tile(tmp_path / "tiles")], buffer_m=0.5)
    assert "\n" not in str(caught.value)


def command(folder: Path, *options: str) -> int | str | None:
    """Run the command on what `compared` wrote; return its exit code."""
    arguments = ["compare", f"{folder}/tiles", "--results", f"{folder}/results", "--truth", f"{folder}/truth.geojson"]
    with pytest.raises(SystemExit) as caught:
        run([*arguments, *options])
    return caught.value.code


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 0),
        (["--require-quality", "0.64"], 0),
        (["--require-quality", "0.68"], 1),
        (["--require-loops"], 1),
        (["--require-loops", "--require-quality", "0.64"], 1),
        (["--buffer", "0.01", "--require-quality", "1"], 1),
    ],
)
def test_the_exit_code_tells_whether_the_requirements_are_met(tmp_path: Path, options: list[str], code: int) -> None:
    """Scripts and CI act on it: here two lines are found and one is made up, and the loop is not found."""
    truth: Lines = [*STREETS, [(300, 0), (300, 100)], [(200, 200), (300, 200), (300, 300), (200, 200)]]
    compared(tmp_path, [*STREETS, [(50, 0), (50, 150)]], truth)
    right, true, found = 1200, 1200 + 100 + 200 + 100 * 2**0.5, 1200 + 150
    assert 0.64 < right / (true + found - right) < 0.68
    assert command(tmp_path, *options) == code


def test_every_loop_kept_meets_the_requirement(tmp_path: Path) -> None:
    """The nearest neighbour of a lost loop."""
    compared(tmp_path, shifted(BLOCK, 0.4), BLOCK)
    assert command(tmp_path, "--require-loops", "--require-quality", "0.99") == 0


def test_the_table_has_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a person reads, found beside truth."""
    compared(tmp_path, STREETS[:1], [*STREETS, *BLOCK])
    assert command(tmp_path) == 0
    table = capsys.readouterr().out
    rows = {line.strip("│ ").split("│")[0].strip(): line for line in table.splitlines() if "│" in line}
    figures = {name: [cell.strip() for cell in line.strip("│ ").split("│")[1:]] for name, line in rows.items()}
    assert figures["length (m)"] == ["183", "610"]
    assert figures["components"] == ["1", "3"]
    assert figures["dead ends"] == ["0", "0"]
    assert figures["loops"] == ["0", "1"]
    assert figures["loops within a tile, kept"] == ["0", "1"]
    assert figures["completeness at 0.5 m"][0] == "0.3000"
    assert figures["correctness at 0.5 m"][0] == "1.0000"
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize("missing", ["tiles", "results/centerlines/a.geojson", "truth.geojson"])
def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str) -> None:
    """The name of the file is what helps."""
    compared(tmp_path, STREETS, STREETS)
    (tmp_path / missing).rename(tmp_path / "elsewhere")
    assert command(tmp_path) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert f"{tmp_path}/{missing}" in output.err


@pytest.mark.parametrize("kind", ["no CRS", "no image"])
def test_a_tile_that_cannot_be_placed_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Without a place on earth nothing can be compared."""
    compared(tmp_path, STREETS, STREETS)
    if kind == "no CRS":
        write_tile(tmp_path / "tiles", crs=None)
    else:
        (tmp_path / "tiles/a.tif").write_text("no image")
    assert command(tmp_path) == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert f"tile {tmp_path}/tiles/a.tif" in output.err


def test_tiles_in_a_bucket_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """At once, not after a list of them has been fetched."""
    with pytest.raises(SystemExit) as caught:
        run(["compare", "s3://b/a.tif", "--results", "r", "--truth", "t"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "centerlines: s3://b/a.tif: compare reads tiles of this machine only; download them\n"
    )
