"""Centerlines as GeoJSON."""

import json
import re
from pathlib import Path

import numpy as np
import pyogrio
import pytest
from numpy.typing import NDArray

from centerlines.errors import TileError
from centerlines.geojson import LineFeature, write_lines


def _line(lonlat: object, **changes: float) -> LineFeature:
    numbers = {"length_m": 12.34567, "width_m": 1.5, "confidence": 0.91234, **changes}
    return LineFeature(np.asarray(lonlat, dtype=np.float64), start_node=3, end_node=4, **numbers)


def _coordinates(data: bytes, feature: int = 0) -> NDArray[np.float64]:
    return np.asarray(json.loads(data)["features"][feature]["geometry"]["coordinates"])


def test_gdal_reads_back_what_was_written(tmp_path: Path) -> None:
    """The files must open in QGIS and ogr2ogr with their properties, in longitude and latitude."""
    first = np.array([[-74.5, 40.25], [-74.123456789, 40.1234567891], [-74.0, 40.0]])
    path = tmp_path / "a.geojson"
    path.write_bytes(write_lines([_line(first), _line([[0.0, 0.0], [1.0, -1.0]])], tile_id="tile é/1"))
    meta, table = pyogrio.read_arrow(path)
    assert meta["crs"] == "EPSG:4326"
    assert meta["geometry_type"] == "LineString"
    rows = table.to_pylist()
    assert [row["tile_id"] for row in rows] == ["tile é/1"] * 2
    assert [row["line_id"] for row in rows] == [0, 1]
    assert {key: rows[0][key] for key in ("start_node", "end_node", "length_m", "width_m", "confidence")} == {
        "start_node": 3,
        "end_node": 4,
        "length_m": 12.346,
        "width_m": 1.5,
        "confidence": 0.912,
    }
    _, _, geometry, _ = pyogrio.raw.read(path)
    points = np.frombuffer(geometry[0][9:], dtype="<f8").reshape(-1, 2)
    np.testing.assert_allclose(points, first, atol=5.1e-10)


def test_the_document_is_rfc_7946() -> None:
    """A crs member is gone from the standard, and fewer than 7 digits would move lines by decimetres."""
    data = write_lines([_line([[-74.5, 40.0], [-74.25, 40.125]])], tile_id="a")
    document = json.loads(data)
    assert document["type"] == "FeatureCollection"
    assert "crs" not in document
    assert all(
        len(digits) == 9 for digits in re.findall(r"-?\d+\.(\d+)", re.findall(r"coordinates.*", data.decode())[0])
    )


def test_no_lines_make_an_empty_collection(tmp_path: Path) -> None:
    """A tile without sidewalks still has its file, and GDAL opens it."""
    data = write_lines([], tile_id="a")
    assert json.loads(data) == {"type": "FeatureCollection", "features": []}
    path = tmp_path / "empty.geojson"
    path.write_bytes(data)
    assert pyogrio.read_info(path)["features"] == 0


def test_repeated_points_are_written_once() -> None:
    """Points closer than the last digit become equal, and zero-length segments upset map software."""
    data = write_lines([_line([[1, 2], [1, 2], [1 + 1e-11, 2], [3, 4], [3, 4], [1, 2]])], tile_id="a")
    np.testing.assert_array_equal(_coordinates(data), [[1, 2], [3, 4], [1, 2]])


@pytest.mark.parametrize("points", [[[1, 2]], [[1, 2], [1, 2]], np.empty((0, 2))])
def test_a_line_without_two_distinct_points_is_left_out(points: object) -> None:
    """A LineString of one point is invalid GeoJSON; the others keep their numbers."""
    data = write_lines([_line(points), _line([[1, 2], [3, 4]])], tile_id="a")
    assert [feature["properties"]["line_id"] for feature in json.loads(data)["features"]] == [1]


def test_the_same_lines_give_the_same_bytes() -> None:
    """A second run must not look like a change; -0 and 0 are one place."""
    lines = [_line([[-0.0, 0.0], [1e-12, 5.0]])]
    assert write_lines(lines, tile_id="a") == write_lines([_line([[0.0, -0.0], [0.0, 5.0]])], tile_id="a")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_coordinate_or_property_that_is_not_finite_is_refused(bad: float) -> None:
    """NaN and Infinity are not JSON: the whole file would be unreadable."""
    with pytest.raises(TileError, match=r"line 0 of tile a .* not finite"):
        write_lines([_line([[1, bad], [3, 4]])], tile_id="a")
    with pytest.raises(TileError, match="not finite"):
        write_lines([_line([[1, 2], [3, 4]], width_m=bad)], tile_id="a")
