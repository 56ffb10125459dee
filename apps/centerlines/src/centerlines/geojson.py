"""Write centerlines as GeoJSON."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from centerlines.errors import TileError

__all__ = ["LineFeature", "write_lines"]

_DEGREE_DIGITS = 9  # a tenth of a millimetre
_METRE_DIGITS = 3


@dataclass(frozen=True)
class LineFeature:
    """One edge of the network of a tile."""

    lonlat: NDArray[np.float64]
    """WGS 84 longitude and latitude in degrees (n, 2)."""
    start_node: int
    """The node at the first point; lines that meet share it."""
    end_node: int
    """The node at the last point."""
    length_m: float
    """Length on the ground in metres."""
    width_m: float
    """Mean width of the mask along the line in metres."""
    confidence: float
    """Mean foreground probability along the line, 0-1."""


def write_lines(lines: Iterable[LineFeature], *, tile_id: str) -> bytes:
    """Write an RFC 7946 FeatureCollection, one LineString feature a text line, the same bytes for the same lines.

    Points that are equal once rounded are written once, and a line with fewer than two points is left out; the
    ``line_id`` of the others is their position among all lines.

    Raises:
        TileError: a coordinate or a property is not finite.
    """
    features = []
    for line_id, line in enumerate(lines):
        values = np.append(line.lonlat, (line.length_m, line.width_m, line.confidence))
        if not np.isfinite(values).all():
            raise TileError(
                f"line {line_id} of tile {tile_id} has a coordinate or property that is not finite;"
                " check the tile's georeference"
            )
        points = _distinct(np.round(line.lonlat, _DEGREE_DIGITS) + 0.0)  # + 0.0 turns -0 into 0
        if len(points) < 2:
            continue
        properties = {
            "tile_id": tile_id,
            "line_id": line_id,
            "start_node": line.start_node,
            "end_node": line.end_node,
            "length_m": round(float(line.length_m), _METRE_DIGITS),
            "width_m": round(float(line.width_m), _METRE_DIGITS),
            "confidence": round(float(line.confidence), 3),
        }
        # By hand, because json writes as many digits as a float needs and no fixed number.
        coordinates = ",".join(f"[{lon:.{_DEGREE_DIGITS}f},{lat:.{_DEGREE_DIGITS}f}]" for lon, lat in points.tolist())
        features.append(
            f'{{"type":"Feature","properties":{json.dumps(properties)},'
            f'"geometry":{{"type":"LineString","coordinates":[{coordinates}]}}}}'
        )
    body = ",\n".join(features)
    return f'{{"type":"FeatureCollection","features":[\n{body}\n]}}\n'.encode()


def _distinct(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Drop each point (n, 2) that repeats the one before it."""
    keep = np.ones(len(points), dtype=np.bool_)
    keep[1:] = (points[1:] != points[:-1]).any(axis=1)
    return points[keep]
