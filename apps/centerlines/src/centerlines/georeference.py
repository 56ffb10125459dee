"""From pixels to metres and to longitude and latitude."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from affine import Affine
from numpy.typing import NDArray
from pyproj import Geod, Transformer
from pyproj.exceptions import CRSError, ProjError

from centerlines.errors import TileError

__all__ = ["Georeference", "PixelSize"]

_WGS84 = Geod(ellps="WGS84")
# Long enough to drown the projection's rounding, short enough that the scale does not change along it.
_BASELINE_PIXELS = 32.0
# A path is 1 to 3 m wide: at these limits it is hundreds of pixels wide, or less than one.
_SMALLEST_PIXEL_M = 0.01
_LARGEST_PIXEL_M = 10.0
# Degrees at 78 degrees of latitude.
_LARGEST_ASPECT = 5.0


@dataclass(frozen=True)
class PixelSize:
    """How far one pixel step goes on the ground."""

    x: float
    """Metres from one column to the next."""
    y: float
    """Metres from one row to the next."""

    def __post_init__(self) -> None:
        """Refuse sizes that no raster has."""
        if not (0 < self.x < np.inf and 0 < self.y < np.inf):
            raise ValueError(f"pixel size {self.x} x {self.y} m: both must be positive and finite")


@dataclass(frozen=True)
class Georeference:
    """Where a tile's pixels lie on the earth.

    Pixel coordinates follow GDAL: x counts columns, y counts rows, and (0, 0) is the outer corner of the first pixel.
    """

    transform: Affine
    """Pixel coordinates to CRS coordinates; may be rotated or south-up."""
    crs: str
    """The coordinate reference system as WKT, or any other text PROJ understands; text, so that it pickles."""

    def pixel_size(self, *, height: int, width: int) -> PixelSize:
        """Measure one pixel step at the centre of a tile of ``height`` x ``width`` pixels.

        The length is geodesic, on the WGS 84 ellipsoid, not the CRS unit times its factor: grid units are not ground
        metres (EPSG:3857 is wrong by 1 / cos(latitude), a third at 40 degrees), and degrees have no factor at all.
        The geodesic is the same for every CRS, whatever its unit.

        Raises:
            TileError: the tile does not lie on the earth.
        """
        half = _BASELINE_PIXELS / 2
        across, down = (half, 0.0), (0.0, half)
        centre = np.array([width / 2, height / 2])
        west, east, north, south = self.to_lonlat(
            np.array([centre - across, centre + across, centre - down, centre + down])
        )
        _, _, lengths = _WGS84.inv([west[0], north[0]], [west[1], north[1]], [east[0], south[0]], [east[1], south[1]])
        try:
            return PixelSize(x=float(lengths[0]) / _BASELINE_PIXELS, y=float(lengths[1]) / _BASELINE_PIXELS)
        except ValueError as error:
            raise TileError(f"{error} at the tile's centre; check the tile's georeference") from error

    def check(self, *, height: int, width: int) -> None:
        """Refuse a tile of ``height`` x ``width`` pixels whose lines would make no sense.

        Raises:
            TileError: pixels far too small, too large or too oblong for paths, most often by a wrong CRS; or a tile
                across the antimeridian or a pole, where longitudes jump.
        """
        size = self.pixel_size(height=height, width=width)
        small, large = sorted((size.x, size.y))
        if small < _SMALLEST_PIXEL_M or large > _LARGEST_PIXEL_M or large > _LARGEST_ASPECT * small:
            raise TileError(
                f"pixels of {size.x:.3g} x {size.y:.3g} m: must be from {_SMALLEST_PIXEL_M:g} to {_LARGEST_PIXEL_M:g} m"
                f" and at most {_LARGEST_ASPECT:g} times as long as wide; check the tile's georeference and CRS"
            )
        longitudes = self.outline(height=height, width=width)[:, 0]
        if np.abs(longitudes).max() > 180 or np.ptp(longitudes) > 180:
            raise TileError(
                "lies across the antimeridian or a pole, where GeoJSON cannot show a line; cut the tile there"
            )

    def to_lonlat(self, xy: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert pixel coordinates (n, 2), x before y, to WGS 84 longitude and latitude in degrees (n, 2).

        Points outside the CRS's domain become infinite.

        Raises:
            TileError: there is no way from the CRS to WGS 84.
        """
        xy = np.asarray(xy, dtype=np.float64)
        t = self.transform
        x = t.a * xy[:, 0] + t.b * xy[:, 1] + t.c
        y = t.d * xy[:, 0] + t.e * xy[:, 1] + t.f
        return np.column_stack(_transformer(self.crs).transform(x, y))

    def outline(self, *, height: int, width: int) -> NDArray[np.float64]:
        """Return the tile's border as a closed counter-clockwise ring of longitude and latitude in degrees (5, 2)."""
        corners = np.array([(0, 0), (0, height), (width, height), (width, 0), (0, 0)], dtype=np.float64)
        south_up = self.transform.determinant > 0
        return self.to_lonlat(corners[::-1] if south_up else corners)


@lru_cache(maxsize=16)
def _transformer(crs: str) -> Transformer:
    """Build the way from a CRS to WGS 84, which takes PROJ longer than a tile's points do."""
    try:
        return Transformer.from_crs(crs, "EPSG:4326", always_xy=True)
    except (CRSError, ProjError) as error:
        raise TileError(f"no way from the tile's CRS to WGS 84: {' '.join(str(error).split())}") from error
