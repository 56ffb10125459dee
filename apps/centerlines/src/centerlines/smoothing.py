"""Move chains of pixel centres to the middle of the mask, without the pixel grid's steps, and simplify them.

All paths of a raster are worked on as one array of points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import shapely
from numpy.typing import NDArray

from centerlines.graph import Points, look_up

__all__ = ["Paths", "centre", "resample", "simplify", "smooth"]

_SMOOTHINGS = 6  # rounds of (1, 2, 1) / 4: a Gaussian of 1.7 samples
_PROBE_STEP = 0.25  # pixels between the samples across a line
_LARGEST_SHIFT = 1.0  # pixels; thinning is off by half a pixel, what is further off is a junction or a ragged edge


@dataclass(frozen=True)
class Paths:
    """Points of many paths."""

    points: Points
    """Vertices, (n, 2) as x, y in pixels, path after path."""
    counts: NDArray[np.intp]
    """Number of vertices of each path, at least 2."""

    @property
    def owner(self) -> NDArray[np.intp]:
        """Index of each point's path."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def last(self) -> NDArray[np.intp]:
        """Index of each path's last point."""
        return np.cumsum(self.counts) - 1

    @property
    def first(self) -> NDArray[np.intp]:
        """Index of each path's first point."""
        return np.cumsum(self.counts) - self.counts

    @classmethod
    def of(cls, paths: Sequence[Points]) -> Paths:
        """Collect paths of (n, 2) points each."""
        return cls(np.concatenate(paths), np.array([len(path) for path in paths]))

    def split(self) -> list[Points]:
        """The paths one by one."""
        return np.split(self.points, self.last[:-1] + 1)

    def means(self, values: NDArray[np.floating]) -> Points:
        """Mean over each path of one value a point, NaN left out; NaN where none is left."""
        known = ~np.isnan(values)
        sums = np.add.reduceat(np.where(known, values, 0.0), self.first, dtype=np.float64)
        counts = np.add.reduceat(known, self.first, dtype=np.float64)
        return np.asarray(np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0))


def resample(paths: Paths, spacing: NDArray[np.float64]) -> Paths:
    """Points at equal distances along each path, at most `spacing` (one value a path) apart; the ends are the same."""
    steps = np.hypot(*np.diff(paths.points, axis=0).T)
    steps[paths.last[:-1]] = 0.0
    along = np.concatenate([[0.0], np.cumsum(steps)])
    start, length = along[paths.first], along[paths.last] - along[paths.first]
    counts = np.maximum(np.ceil(length / spacing), 1).astype(np.intp) + 1
    result = Paths(np.empty((counts.sum(), 2)), counts)
    share = (np.arange(len(result.points)) - result.first[result.owner]) / (counts - 1)[result.owner]
    wanted = start[result.owner] + share * length[result.owner]
    # Where one path ends the next begins, at the same distance along: one pixel more for each path keeps them apart.
    known, wanted = along + paths.owner, wanted + result.owner
    for axis in (0, 1):
        result.points[:, axis] = np.interp(wanted, known, paths.points[:, axis])
    result.points[result.first] = paths.points[paths.first]
    result.points[result.last] = paths.points[paths.last]
    return result


def smooth(paths: Paths, mask: NDArray[np.uint8]) -> Paths:
    """Take out the pixel grid's steps; ends stay, and so does what would leave the mask.

    Args:
        paths: With points at equal distances.
        mask: (height, width), 0 or 1.
    """
    points = paths.points.copy()
    for _ in range(_SMOOTHINGS):
        points[1:-1] = points[:-2] / 4 + points[1:-1] / 2 + points[2:] / 4
        points[paths.first] = paths.points[paths.first]
        points[paths.last] = paths.points[paths.last]
    outside = look_up(mask, points) == 0
    beside = np.convolve(outside, np.ones(3), mode="same") > 0
    points[beside] = paths.points[beside]
    return Paths(points, paths.counts)


def centre(paths: Paths, mask: NDArray[np.uint8], reach: NDArray[np.float64]) -> tuple[Paths, Points]:
    """Shift each point across its path to the middle between the mask's edges; ends stay.

    Thinning is half a pixel off where the width is an even number of pixels.

    Args:
        paths: Smooth paths in the mask.
        mask: (height, width), 0 or 1.
        reach: How far to look for the mask's edge, in pixels, one value a path; a point that sees none stays.

    Returns:
        The paths, and the mask's width across each point in pixels; NaN where no edge was seen.
    """
    points = paths.points
    along = np.zeros_like(points)
    along[1:-1] = points[2:] - points[:-2]
    along[paths.first] = along[paths.last] = 0.0
    along /= np.maximum(np.hypot(*along.T), 1e-9)[:, None]
    across = along[:, ::-1] * (-1.0, 1.0)
    limit = reach[paths.owner]
    ahead, behind = (_distance_to_edge(points, direction, mask, limit) for direction in (across, -across))
    shift = (ahead - behind) / 2
    shift[~(np.abs(shift) <= _LARGEST_SHIFT)] = 0.0
    width = ahead + behind
    width[paths.first] = width[paths.last] = np.nan
    return Paths(points + shift[:, None] * across, paths.counts), width


def _distance_to_edge(points: Points, direction: Points, mask: NDArray[np.uint8], limit: NDArray[np.float64]) -> Points:
    """Distance from each point to the mask's edge along its direction; NaN if beyond the limit or the raster."""
    distance = np.full(len(points), np.nan)
    extent = mask.shape[::-1]
    inside = np.arange(len(points))
    for step in range(1, int(limit.max() / _PROBE_STEP) + 1):
        probe = points[inside] + (step * _PROBE_STEP) * direction[inside]
        left = look_up(mask, probe) == 0
        on_raster = ((probe >= 0) & (probe <= extent)).all(axis=1)
        distance[inside[left & on_raster]] = (step - 0.5) * _PROBE_STEP
        inside = inside[~left & on_raster & (limit[inside] > step * _PROBE_STEP)]
    return distance


def simplify(paths: Paths, mask: NDArray[np.uint8], *, tolerance: float, parts: NDArray[np.intp]) -> Paths:
    """Drop vertices that lie within the tolerance of the line without them; more stay where it would leave the mask.

    Args:
        paths: Paths in the mask.
        mask: (height, width), 0 or 1.
        tolerance: In pixels.
        parts: In how many parts to simplify each path, so that it keeps at least as many segments.
    """
    keep = np.zeros(len(paths.points), dtype=bool)
    keep[paths.last] = True
    part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    segments, first, parts = (np.repeat(values, parts) for values in (paths.counts - 1, paths.first, parts))
    start, stop = first + segments * part // parts, first + segments * (part + 1) // parts
    start, stop = start[stop > start], stop[stop > start]
    while len(start):
        keep[start] = True
        # The third coordinate tells which vertices are left.
        counts = stop - start + 1
        index = np.repeat(start - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        lines = shapely.linestrings(
            np.column_stack([paths.points[index], index]), indices=np.repeat(np.arange(len(counts)), counts)
        )
        simple = shapely.simplify(lines, tolerance, preserve_topology=False)
        vertices, owner = shapely.get_coordinates(simple, include_z=True, return_index=True)
        dense = resample(Paths(vertices[:, :2], np.bincount(owner)), np.full(len(counts), 0.5))
        good = (np.minimum.reduceat(look_up(mask, dense.points), dense.first) > 0) | (counts == 2)
        keep[vertices[good[owner], 2].astype(np.intp)] = True
        start, stop = start[~good], stop[~good]
        middle = (start + stop) // 2
        start, stop = np.concatenate([start, middle]), np.concatenate([middle, stop])
    return Paths(paths.points[keep], np.add.reduceat(keep, paths.first, dtype=np.intp))
