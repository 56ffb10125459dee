"""From a raster of probabilities to centerlines: clean the mask, thin it, make its graph, draw it smooth."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from centerlines.georeference import PixelSize
from centerlines.graph import (
    Edge,
    Points,
    bridge_gaps,
    contract_junctions,
    drop_short_components,
    extend_ends,
    look_up,
    merge_chains,
    prune_spurs,
    trace,
)
from centerlines.smoothing import Paths, centre, resample, simplify, smooth
from centerlines.thinning import thin

__all__ = ["Line", "LineSettings", "clean_mask", "extract_lines"]

_T = TypeVar("_T", bound=np.generic)

_HEADING_M = 3.0  # length at a line's end that tells its direction when gaps are bridged


@dataclass(frozen=True)
class LineSettings:
    """What counts as a line."""

    closing_m: float = 0.3
    """Gaps and notches up to twice this wide are closed before anything else; metres, rounded to whole pixels."""
    smallest_region_m2: float = 5.0
    """Smaller pieces of the mask are dropped; square metres."""
    smallest_hole_m2: float = 1.0
    """Smaller holes in the mask are filled; square metres."""
    plaza_width_m: float = 8.0
    """What is wider than this is an area, not a line: lines end at it; metres."""
    spur_ratio: float = 1.0
    """A side branch is pruned if it sticks out of its line by less than this many line widths."""
    gap_m: float = 4.0
    """Longest gap between two ends that is bridged; metres, 0 bridges none."""
    gap_turn_deg: float = 40.0
    """Largest angle between a bridge and the lines it joins; degrees."""
    shortest_m: float = 3.0
    """Pieces of the network that are shorter in all are dropped; metres."""
    tolerance_m: float = 0.3
    """Lines are simplified by at most this distance; metres."""


@dataclass(frozen=True)
class Line:
    """A centerline between two nodes of the network."""

    xy: Points
    """Vertices, (n, 2) as column, row in pixels; the first pixel's outer corner is (0, 0), its centre (0.5, 0.5)."""
    start_node: int
    """Node at the first vertex; lines that meet have the same node, and there the bit-identical vertex."""
    end_node: int
    """Node at the last vertex; equal to start_node for a ring, whose last vertex is its first."""
    length_m: float
    """Length in metres."""
    width_m: float
    """Mean width of the mask along the line in metres."""
    confidence: float
    """Mean probability along the line, 0-1."""


def clean_mask(
    probability: NDArray[np.float32],
    valid: NDArray[np.bool_],
    *,
    threshold: float,
    pixel_size: PixelSize,
    settings: LineSettings,
) -> NDArray[np.uint8]:
    """Threshold the probability, close small gaps, drop small regions, fill small holes.

    Args:
        probability: (height, width), 0-1; NaN is below every threshold.
        valid: (height, width); the mask is 0 where there is no data, but for holes that are small.
        threshold: A pixel is foreground from this probability on.
        pixel_size: Size of a pixel.
        settings: What counts as small.

    Returns:
        (height, width), 0 or 1.
    """
    pixel_area = pixel_size.x * pixel_size.y
    # Single pixels without data, as of a glare that is also the nodata value, are no holes in a path either.
    covered = valid.astype(np.uint8)
    _drop_small(covered, 0, smallest=settings.smallest_hole_m2 / pixel_area, connectivity=8)
    mask = ((probability >= threshold) & valid).astype(np.uint8)
    kernel = np.ones([2 * round(settings.closing_m / size) + 1 for size in (pixel_size.y, pixel_size.x)], np.uint8)
    mask = np.asarray(cv2.morphologyEx(mask, cv2.MORPH_CLOSE, kernel), dtype=np.uint8)
    _drop_small(mask, 1, smallest=settings.smallest_region_m2 / pixel_area, connectivity=8)
    _drop_small(mask, 0, smallest=settings.smallest_hole_m2 / pixel_area, connectivity=4)
    return np.asarray(mask & covered, dtype=np.uint8)


def _drop_small(mask: NDArray[np.uint8], value: int, *, smallest: float, connectivity: int) -> None:
    """Flip, in place, the regions of `value` with fewer pixels than `smallest`."""
    _, labels, stats, _ = cv2.connectedComponentsWithStats((mask == value).astype(np.uint8), connectivity=connectivity)
    small = stats[:, cv2.CC_STAT_AREA] < smallest
    small[0] = False
    if small.any():
        mask[small[labels]] = 1 - value


def extract_lines(
    mask: NDArray[np.uint8],
    probability: NDArray[np.float32],
    *,
    pixel_size: PixelSize,
    settings: LineSettings,
    valid: NDArray[np.bool_] | None = None,
) -> list[Line]:
    """Centerlines of a mask as a network of lines with shared nodes; every hole in the mask stays a loop.

    Args:
        mask: (height, width), 0 or 1.
        probability: (height, width), 0-1.
        pixel_size: Size of a pixel.
        settings: What counts as a line.
        valid: (height, width); no gap is bridged over pixels without data. Default: all pixels hold data.
    """
    height, width = mask.shape
    side = min(pixel_size.x, pixel_size.y)
    shape = (round(height * pixel_size.y / side), round(width * pixel_size.x / side))
    if shape != mask.shape:
        mask, probability = _resampled(mask, shape), _resampled(probability, shape)
        valid = None if valid is None else _resampled(valid, shape)
    valid = np.broadcast_to(np.True_, shape) if valid is None else valid
    to_pixels = np.array([width / shape[1], height / shape[0]])
    to_metres = to_pixels * (pixel_size.x, pixel_size.y)

    mask, skeleton, radius = _thin(mask, widest=settings.plaza_width_m / side)
    edges = prune_spurs(merge_chains(trace(skeleton)), radius, ratio=settings.spur_ratio)
    edges = extend_ends(contract_junctions(edges, radius), mask, radius)
    edges = _bridged(edges, mask, valid, settings, side)
    edges = drop_short_components(edges, shortest=settings.shortest_m / side)
    if not edges:
        return []
    paths = Paths.of([edge.path for edge in edges])
    reach = paths.means(look_up(radius, paths.points))
    paths = smooth(resample(paths, np.maximum(reach / 2, 1.0)), mask)
    paths, across = centre(paths, mask, 1.5 * reach + 2.0)
    paths = smooth(paths, mask)
    lines = simplify(paths, mask, tolerance=settings.tolerance_m / side, parts=_least_segments(edges))

    widths = paths.means(across)
    widths = side * np.where(np.isnan(widths), 2 * reach, widths)
    confidences = paths.means(look_up(probability, paths.points))
    nodes: dict[int, int] = {}
    return [
        Line(
            xy=xy * to_pixels,
            start_node=nodes.setdefault(edge.start, len(nodes)),
            end_node=nodes.setdefault(edge.end, len(nodes)),
            length_m=float(np.hypot(*np.diff(xy * to_metres, axis=0).T).sum()),
            width_m=float(width),
            confidence=float(confidence),
        )
        for edge, xy, width, confidence in zip(edges, lines.split(), widths, confidences, strict=True)
    ]


def _resampled(values: NDArray[_T], shape: tuple[int, int]) -> NDArray[_T]:
    """Nearest pixels for a raster of the same extent and another shape (height, width)."""
    rows, columns = ((np.arange(new) * 2 + 1) * old // (2 * new) for new, old in zip(shape, values.shape, strict=True))
    return values[np.ix_(rows, columns)]


def _thin(
    mask: NDArray[np.uint8], *, widest: float
) -> tuple[NDArray[np.uint8], NDArray[np.bool_], NDArray[np.float32]]:
    """The mask without areas wider than `widest` pixels, its skeleton, and the distance to its edge in pixels."""
    pad = int(widest / 2) + 2
    continued = _continued(mask, pad=pad, longest_run=widest)
    distance = cv2.distanceTransform(continued, cv2.DIST_L2, cv2.DIST_MASK_5)
    if (distance > widest / 2).any():
        continued[_within(distance > widest / 2, widest / 2 + 1.5)] = 0
        distance = cv2.distanceTransform(continued, cv2.DIST_L2, cv2.DIST_MASK_5)
    skeleton = thin(continued)
    inner = (slice(pad, -pad), slice(pad, -pad))
    # OpenCV measures to the centre of the nearest background pixel; the edge is half a pixel nearer.
    return continued[inner].copy(), skeleton[inner], distance[inner] - np.float32(0.5)


def _continued(mask: NDArray[np.uint8], *, pad: int, longest_run: float) -> NDArray[np.uint8]:
    """The mask with a frame of `pad` pixels in which what crosses the raster's border goes straight on.

    Thinning then reaches the border.
    """
    padded = np.pad(mask, pad)
    inner = slice(pad, -pad)
    padded[:pad, inner] = _crossing(mask, longest_run)
    padded[-pad:, inner] = _crossing(mask[::-1], longest_run)
    padded[inner, :pad] = _crossing(mask.T, longest_run)[:, None]
    padded[inner, -pad:] = _crossing(mask.T[::-1], longest_run)[:, None]
    return padded


def _crossing(mask: NDArray[np.uint8], longest_run: float) -> NDArray[np.uint8]:
    """The first row without its runs of ones that belong to a line beside the border rather than across it.

    If such a run were continued, its line would be drawn outside the raster: it is a long one, or longer than four
    times the mask's depth at its middle, or there is a hole behind it.
    """
    row: NDArray[np.uint8] = mask[0].copy()
    for start, stop in _runs(row):
        length = stop - start
        depth = mask[: length // 4 + 1, (start + stop) // 2]
        if length > longest_run or not depth.all() or _splits(mask[: length // 2 + 2], start, stop):
            row[start:stop] = 0
    return row


def _runs(row: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Start and stop of each run of ones."""
    changes = np.flatnonzero(np.diff(row, prepend=0, append=0)).tolist()
    return list(zip(changes[::2], changes[1::2], strict=True))


def _splits(rows: NDArray[np.uint8], start: int, stop: int) -> bool:
    """Whether a run in the first row falls into two runs further down."""
    for row in rows[1:]:
        left = max(start - 1, 0)
        touching = _runs(row[left : stop + 1])
        if len(touching) != 1:
            return len(touching) > 1
        start, stop = left + touching[0][0], left + touching[0][1]
    return False


def _within(area: NDArray[np.bool_], distance: float) -> NDArray[np.bool_]:
    """Pixels at most `distance` pixels from the area."""
    return cv2.distanceTransform((~area).astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_5) <= distance


def _bridged(
    edges: list[Edge], mask: NDArray[np.uint8], valid: NDArray[np.bool_], settings: LineSettings, side: float
) -> list[Edge]:
    """The edges with their gaps closed; the bridges are drawn into the mask."""
    edges, bridges = bridge_gaps(
        edges, mask, valid, gap=settings.gap_m / side, max_turn=settings.gap_turn_deg, heading=_HEADING_M / side
    )
    for bridge in bridges:
        start, end = bridge.path.astype(int).tolist()
        cv2.line(mask, start, end, color=1, thickness=3)
    mask[~valid] = 0
    return merge_chains([*edges, *bridges])


def _least_segments(edges: list[Edge]) -> NDArray[np.intp]:
    """Segments each edge needs to be a line of its own: three for a ring, two where another joins the same nodes."""
    pairs = Counter(frozenset((edge.start, edge.end)) for edge in edges)
    return np.array(
        [3 if edge.start == edge.end else 1 + (pairs[frozenset((edge.start, edge.end))] > 1) for edge in edges]
    )
