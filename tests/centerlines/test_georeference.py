"""Pixels to metres and degrees."""

import math
import pickle

import numpy as np
import pytest
from affine import Affine
from numpy.typing import NDArray
from pyproj import Geod, Transformer
from rasterio.warp import transform as gdal_transform
from shapely.geometry import Polygon

from centerlines.errors import TileError
from centerlines.georeference import Georeference

GEOD = Geod(ellps="WGS84")
NEW_JERSEY = (-74.5, 40.2)
FEET = "+proj=tmerc +lat_0=38.8 +lon_0=-74.5 +k=0.9999 +x_0=150000 +datum=NAD83 +units=ft +type=crs"


def _around(crs: str, *, step: float, angle: float = 0.0, south_up: bool = False) -> Georeference:
    """Place a raster with square pixels of ``step`` CRS units so that pixel (1000, 1000) lies in New Jersey."""
    x, y = Transformer.from_crs("EPSG:4326", crs, always_xy=True).transform(*NEW_JERSEY)
    scale = Affine.scale(step, step if south_up else -step)
    transform = Affine.translation(x, y) @ Affine.rotation(angle) @ scale @ Affine.translation(-1000, -1000)
    return Georeference(transform, crs)


@pytest.mark.parametrize(
    ("crs", "step"),
    [
        ("EPSG:26918", 0.3),  # metres
        ("EPSG:3424", 1.0),  # US survey feet
        (FEET, 1.0),  # international feet
        ("EPSG:3857", 0.3),  # metres that are not metres on the ground
        ("EPSG:4269", 3e-6),  # degrees
        ("EPSG:2193", 0.3),  # far outside its zone, and with northing before easting
    ],
)
@pytest.mark.parametrize("angle", [0.0, 90.0])
@pytest.mark.parametrize("south_up", [False, True])
def test_the_same_path_is_equally_long_in_every_crs(crs: str, step: float, angle: float, south_up: bool) -> None:
    """Otherwise lengths, and every metre setting, would depend on the unit of the file's CRS."""
    if crs == "EPSG:2193":
        x, y, place = 1750000.0, 5430000.0, Affine.rotation(angle) @ Affine.scale(step, step if south_up else -step)
        georeference = Georeference(Affine.translation(x, y) @ place @ Affine.translation(-1000, -1000), crs)
    else:
        georeference = _around(crs, step=step, angle=angle, south_up=south_up)
    size = georeference.pixel_size(height=2000, width=2000)
    pixels = np.array([[200.0, 300.0], [1700.0, 1500.0]])
    ends = georeference.to_lonlat(pixels)
    truth = GEOD.inv(*ends[0], *ends[1])[2]
    found = math.hypot(1500 * size.x, 1200 * size.y)
    assert found == pytest.approx(truth, rel=1e-3)


def test_a_pixel_of_one_survey_foot_is_a_foot_on_the_ground() -> None:
    """The New Jersey tiles are in feet: read as metres, every sidewalk would be three times too wide."""
    size = _around("EPSG:3424", step=1.0).pixel_size(height=2000, width=2000)
    assert size.x == pytest.approx(1200 / 3937, rel=2e-4)
    assert size.y == pytest.approx(1200 / 3937, rel=2e-4)


def test_web_mercator_pixels_are_ground_metres() -> None:
    """A pixel of EPSG:3857 claims one metre and covers three quarters of it in New Jersey."""
    size = _around("EPSG:3857", step=1.0).pixel_size(height=2000, width=2000)
    latitude, e2 = math.radians(NEW_JERSEY[1]), 0.00669437999014
    bend = 1 - e2 * math.sin(latitude) ** 2
    assert size.x == pytest.approx(math.cos(latitude) / math.sqrt(bend), rel=1e-6)
    assert size.y == pytest.approx((1 - e2) / bend**1.5 * math.cos(latitude), rel=1e-6)


def test_a_step_of_the_pixel_grid_is_measured_along_that_axis() -> None:
    """Swapped axes would go unnoticed with square pixels and spoil every raster of degrees."""
    x, y = NEW_JERSEY
    size = Georeference(Affine(2e-6, 0, x, 0, -1e-6, y), "EPSG:4326").pixel_size(height=10, width=10)
    assert size.x == pytest.approx(GEOD.inv(x, y, x + 2e-3, y)[2] / 1000, rel=1e-5)
    assert size.y == pytest.approx(GEOD.inv(x, y, x, y - 1e-3)[2] / 1000, rel=1e-5)


@pytest.mark.parametrize("crs", ["EPSG:3424", "EPSG:26918", "EPSG:4326", "EPSG:2193", "EPSG:31467", "EPSG:3857"])
def test_pixels_land_where_gdal_puts_them(crs: str) -> None:
    """Lines would lie beside their sidewalk, or mirrored for a CRS that names northing first."""
    x, y = Transformer.from_crs("EPSG:4326", crs, always_xy=True).transform(9.1, 48.2)
    step = 1e-6 if crs == "EPSG:4326" else 0.3
    transform = Affine(step, step / 7, x, step / 5, -step, y)
    points = np.random.default_rng(0).uniform(-10, 5000, (50, 2))
    expected = gdal_transform(crs, "EPSG:4326", *zip(*(transform @ tuple(point) for point in points), strict=True))
    np.testing.assert_allclose(Georeference(transform, crs).to_lonlat(points), np.column_stack(expected), atol=1e-9)


@pytest.mark.parametrize("south_up", [False, True])
def test_the_outline_is_a_closed_counter_clockwise_ring(south_up: bool) -> None:
    """RFC 7946 wants outer rings counter-clockwise; some maps fill the rest of the world otherwise."""
    georeference = _around("EPSG:3424", step=1.0, angle=20, south_up=south_up)
    ring: NDArray[np.float64] = georeference.outline(height=30, width=20)
    assert ring.shape == (5, 2)
    polygon = Polygon(ring)
    assert polygon.exterior.is_ccw
    assert abs(GEOD.geometry_area_perimeter(polygon)[0]) == pytest.approx(600 * (1200 / 3937) ** 2, rel=1e-3)


def test_a_georeference_survives_pickling() -> None:
    """It travels between processes with the tile."""
    georeference = _around("EPSG:3424", step=1.0)
    copy = pickle.loads(pickle.dumps(georeference))  # noqa: S301
    assert copy == georeference
    assert copy.pixel_size(height=1, width=1) == georeference.pixel_size(height=1, width=1)


@pytest.mark.parametrize("crs", ['LOCAL_CS["site",UNIT["metre",1]]', "IAU_2015:30100", "nonsense"])
def test_a_crs_without_a_way_to_the_earth_is_refused_in_one_line(crs: str) -> None:
    """A site plan or a map of the Moon must fail as that tile, with a reason, not crash the run."""
    with pytest.raises(TileError, match="WGS 84") as caught:
        Georeference(Affine(1, 0, 0, 0, -1, 0), crs).to_lonlat(np.zeros((1, 2)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("across", "down", "plausible"),
    [(0.02, 0.02, True), (0.005, 0.005, False), (9, 9, True), (12, 12, False), (1, 4, True), (1, 6, False)],
)
def test_pixels_that_cannot_show_a_path_are_refused(across: float, down: float, plausible: bool) -> None:
    """A CRS in metres on a tile in degrees asks for arrays of many gigabytes, and one tile would hold up the run."""
    georeference = Georeference(Affine(across, 0, 500_000, 0, -down, 4_500_000), "EPSG:26918")
    if plausible:
        georeference.check(height=100, width=100)
    else:
        with pytest.raises(TileError, match=r"^pixels of .* m: must be .*; check the tile's georeference and CRS$"):
            georeference.check(height=100, width=100)


@pytest.mark.parametrize(("longitude", "plausible"), [(179.99, True), (179.9999, False)])
def test_a_tile_across_the_antimeridian_is_refused(longitude: float, plausible: bool) -> None:
    """A line from 179.99 to 180.01 degrees is not valid GeoJSON, and one to -179.99 goes round the earth."""
    georeference = Georeference(Affine(2e-6, 0, longitude, 0, -2e-6, 60.0), "EPSG:4326")
    if plausible:
        georeference.check(height=100, width=100)
    else:
        with pytest.raises(TileError, match="antimeridian"):
            georeference.check(height=100, width=100)


def test_a_tile_that_lies_nowhere_has_no_pixel_size() -> None:
    """A transform in the wrong unit would otherwise give lengths of infinity."""
    with pytest.raises(TileError, match="pixel size"):
        Georeference(Affine(1, 0, 1e12, 0, -1, 1e12), "EPSG:26918").pixel_size(height=10, width=10)
