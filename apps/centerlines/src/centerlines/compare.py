"""How well a network of lines matches a truth: by length within a buffer, and by its shape as a graph.

Length alone does not see a network that is cut at every junction: completeness and correctness stay high. So
components, dead ends and loops are counted as well. All coordinates are in metres in a planar CRS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import shapely
from numpy.typing import NDArray
from shapely.geometry import LineString
from shapely.geometry.base import BaseGeometry

__all__ = ["LoopCount", "NetworkComparison", "NetworkShape", "compare_networks", "loops_kept", "network_shape"]

_SNAP_M = 0.05  # ends nearer than this meet

# Above 0.5 a face has at most one match: two loops that lost the side between them count as one kept at most. Much more
# would miss small loops that are there, because sidewalks that meet at a sharp angle fill a good part of them.
_SAME_FACE_IOU = 0.6


@dataclass(frozen=True)
class NetworkShape:
    """A network as a graph, after lines that cross or touch have been joined there."""

    components: int
    """Pieces that are not connected with each other."""
    dead_ends: int
    """Ends where nothing else is, not counting those at the outline of the compared area."""
    loops: int
    """Independent cycles: edges - nodes + components."""


@dataclass(frozen=True)
class NetworkComparison:
    """What was found against what is true; after Heipke et al. 1997, Evaluation of automatic road extraction."""

    found_length_m: float
    """Length of the found lines in metres."""
    truth_length_m: float
    """Length of the true lines in metres."""
    completeness: float
    """Share of the true length that lies within the buffer of what was found; 1 if there is nothing to find."""
    correctness: float
    """Share of the found length that lies within the buffer of the truth; 1 if nothing was found."""
    quality: float
    """Both in one number: the share that matches of all that is true or found."""
    found: NetworkShape
    """The found network's shape."""
    truth: NetworkShape
    """The true network's shape."""


@dataclass(frozen=True)
class LoopCount:
    """Loops of the truth and how many of them were found."""

    kept: int
    """Loops with a found loop of the same outline."""
    total: int
    """Loops of the truth."""


def compare_networks(
    found: Sequence[LineString],
    truth: Sequence[LineString],
    *,
    buffer_m: float,
    area: BaseGeometry | None = None,
) -> NetworkComparison:
    """Compare two networks.

    Args:
        found: Lines in a planar CRS in metres, joined at shared points or not.
        truth: Lines in the same CRS.
        buffer_m: How far apart two lines may lie to be the same.
        area: Only what lies inside is measured and counted, though what lies outside may match it. Default: everything.
    """
    found_lines, truth_lines = shapely.union_all(found), shapely.union_all(truth)
    found_inside, truth_inside = _inside(found_lines, area), _inside(truth_lines, area)
    completeness = _share_within(truth_inside, found_lines, buffer_m)
    correctness = _share_within(found_inside, truth_lines, buffer_m)
    either = completeness + correctness - completeness * correctness
    return NetworkComparison(
        found_length_m=float(shapely.length(found_inside)),
        truth_length_m=float(shapely.length(truth_inside)),
        completeness=completeness,
        correctness=correctness,
        quality=completeness * correctness / either if either else 0.0,
        found=network_shape(found, area=area, border_m=buffer_m),
        truth=network_shape(truth, area=area, border_m=buffer_m),
    )


def network_shape(
    lines: Sequence[LineString], *, area: BaseGeometry | None = None, border_m: float = _SNAP_M
) -> NetworkShape:
    """Count a network's components, dead ends and loops.

    Args:
        lines: Lines in a planar CRS in metres.
        area: Only what lies inside is counted. Default: everything.
        border_m: An end this near the area's outline is where a line leaves the area, no dead end.
    """
    edges = _noded_parts(_inside(shapely.union_all(lines), area))
    ends = np.stack([shapely.get_point(edges, 0), shapely.get_point(edges, -1)], axis=1)
    # Two ends that meet are at most one step of the grid apart each way.
    nodes = _groups_within(ends.ravel(), 1.5 * _SNAP_M).reshape(-1, 2)
    # A piece that begins and ends at one node and is as short as the snapping distance is a point, not a loop.
    kept = (nodes[:, 0] != nodes[:, 1]) | (shapely.length(edges) > 2 * _SNAP_M)
    ends, nodes = ends[kept], nodes[kept]
    names, nodes = np.unique(nodes, return_inverse=True)
    nodes = nodes.reshape(-1, 2)
    components = len(np.unique(_connected(len(names), nodes)))
    dead = ends[np.bincount(nodes.ravel(), minlength=len(names))[nodes] == 1]
    if area is not None:
        dead = dead[shapely.distance(dead, area.boundary) > border_m]
    return NetworkShape(components=components, dead_ends=len(dead), loops=len(nodes) - len(names) + components)


def loops_kept(
    found: Sequence[LineString],
    truth: Sequence[LineString],
    *,
    area: BaseGeometry | None = None,
    line_width_m: float = 0.0,
    smallest_hole_m2: float = 0.0,
) -> LoopCount:
    """Count the loops of the truth and those of them that were found.

    A loop is a bounded face of the network. It is kept if a found face has the same area: intersection over union of
    at least 0.6.

    Args:
        found: Lines in a planar CRS in metres.
        truth: Lines in the same CRS.
        area: Only loops of the truth that lie wholly inside count. Default: all.
        line_width_m: Width of what the lines stand for: a loop that this covers is none on the ground, and not counted.
        smallest_hole_m2: Nor is one of which less than this is left uncovered.
    """
    wanted = _faces(truth)
    if area is not None:
        wanted = wanted[shapely.covers(area, wanted)]
    open_area = shapely.area(shapely.buffer(wanted, -line_width_m / 2))
    wanted = wanted[(open_area > 0) & (open_area >= smallest_hole_m2)]
    candidates = _faces(found)
    want, candidate = shapely.STRtree(candidates).query(wanted, predicate="intersects")
    shared = shapely.area(shapely.intersection(wanted[want], candidates[candidate]))
    together = shapely.area(wanted[want]) + shapely.area(candidates[candidate]) - shared
    kept = np.unique(want[shared >= _SAME_FACE_IOU * together])
    return LoopCount(kept=len(kept), total=len(wanted))


def _inside(lines: BaseGeometry, area: BaseGeometry | None) -> BaseGeometry:
    return lines if area is None else shapely.intersection(lines, area)


def _share_within(lines: BaseGeometry, reference: BaseGeometry, buffer_m: float) -> float:
    """Share of the lines' length within the buffer of the reference; 1 if there are no lines."""
    length = float(shapely.length(lines))
    if length == 0:
        return 1.0
    corridor = shapely.union_all(shapely.buffer(shapely.get_parts(reference), buffer_m))
    return float(shapely.length(shapely.intersection(lines, corridor))) / length


def _noded_parts(lines: BaseGeometry) -> NDArray[np.object_]:
    """Pieces of the lines between crossings, on a grid of the snapping distance; points are left out."""
    parts = shapely.get_parts(shapely.union_all(shapely.get_parts(lines), grid_size=_SNAP_M))
    return np.asarray(parts[shapely.length(parts) > 0])


def _faces(lines: Sequence[LineString]) -> NDArray[np.object_]:
    """Bounded faces of a network."""
    return np.asarray(shapely.get_parts(shapely.polygonize(_noded_parts(shapely.union_all(lines)))))


def _groups_within(points: NDArray[np.object_], distance: float) -> NDArray[np.intp]:
    """A number for each point, the same for points that are linked by steps of at most the distance."""
    places, place = np.unique(shapely.get_coordinates(points), axis=0, return_inverse=True)
    distinct = shapely.points(places)
    links = shapely.STRtree(distinct).query(distinct, predicate="dwithin", distance=distance)
    return _connected(len(places), links.T)[place.ravel()]


def _connected(count: int, links: NDArray[np.intp]) -> NDArray[np.intp]:
    """The lowest vertex that each of `count` vertices is connected with, by links (n, 2)."""
    lowest = np.arange(count)
    while True:
        previous = lowest.copy()
        for source, target in (links.T, links.T[::-1]):
            np.minimum.at(lowest, source, lowest[target])
        lowest = lowest[lowest]
        if (lowest == previous).all():
            return lowest
