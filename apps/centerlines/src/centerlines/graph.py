"""The graph of a skeleton: trace it, prune it, join it.

Coordinates are (x, y) in pixels of a square grid; the outer corner of the first pixel is (0, 0). A node is an integer,
and every edge that ends there has the bit-identical vertex. No function here opens a cycle.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import shapely
from numpy.typing import NDArray

__all__ = [
    "Edge",
    "Points",
    "bridge_gaps",
    "contract_junctions",
    "drop_short_components",
    "extend_ends",
    "look_up",
    "merge_chains",
    "prune_spurs",
    "trace",
]

Points = NDArray[np.float64]

_WELL_INSIDE = 0.8  # of a disc's radius
_RAY_STEP = 0.1  # pixels between the samples of a ray that looks for the mask's edge
_BENT_RADII = 1.5  # an end's last pixels over this many radii may bend to a corner of the mask
_STRAIGHT_SHARE = 0.6  # a bend to a corner is longer than the straight run to the end by at most the square root of 2
_HEADING_RADII = 4.0  # an end's direction is taken over this many radii: fewer follow the pixel grid, more cut curves


@dataclass(frozen=True)
class Edge:
    """A chain of vertices between two nodes."""

    start: int
    """Node at the first vertex."""
    end: int
    """Node at the last vertex; equal to start for a ring."""
    path: Points
    """Vertices, (n, 2) as x, y in pixels, n >= 2."""

    @cached_property
    def length(self) -> float:
        """Length in pixels."""
        return float(_steps(self.path).sum())

    def reversed(self) -> Edge:
        """The same edge from its other end."""
        return Edge(self.end, self.start, self.path[::-1])


def look_up(values: NDArray[np.generic], points: Points) -> NDArray[np.float32]:
    """Values of the pixels that hold the points; a point outside the raster takes the nearest pixel.

    Args:
        values: (height, width).
        points: (n, 2) as x, y.
    """
    height, width = values.shape
    columns = np.clip(points[:, 0].astype(np.intp), 0, width - 1)
    rows = np.clip(points[:, 1].astype(np.intp), 0, height - 1)
    return values[rows, columns].astype(np.float32)


def _node_degrees(edges: Sequence[Edge]) -> Counter[int]:
    """How many edge ends meet at each node; a ring counts twice."""
    degrees = Counter(edge.start for edge in edges)
    degrees.update(edge.end for edge in edges)
    return degrees


def trace(skeleton: NDArray[np.bool_]) -> list[Edge]:
    """Edges between the ends and branching points of a thin mask, and its rings; isolated pixels are left out.

    Two diagonal neighbours are linked only where no pixel beside both already links them, and a full 2 x 2 block is
    linked on three sides: what is left has exactly as many cycles as the mask has holes.

    Args:
        skeleton: (height, width).
    """
    flat = np.pad(skeleton, 1).ravel()
    stride = skeleton.shape[1] + 2
    pixels = np.flatnonzero(flat)
    links = _pixel_links(flat, pixels, stride)
    centres = np.stack([pixels % stride, pixels // stride], axis=1) - 0.5
    return [Edge(chain[0], chain[-1], centres[chain]) for chain in _chains(links, len(pixels))]


def _pixel_links(flat: NDArray[np.bool_], pixels: NDArray[np.intp], stride: int) -> NDArray[np.intp]:
    """Pairs of linked pixels as positions in `pixels`, (n, 2)."""
    right, down, left = flat[pixels + 1], flat[pixels + stride], flat[pixels - 1]
    below_a_pair = flat[pixels - stride] & flat[pixels + 1 - stride]
    linked = (
        (1, right & ~below_a_pair),
        (stride, down),
        (stride + 1, flat[pixels + stride + 1] & ~right & ~down),
        (stride - 1, flat[pixels + stride - 1] & ~left & ~down),
    )
    pairs = [(np.flatnonzero(there), np.searchsorted(pixels, pixels[there] + step)) for step, there in linked]
    return np.concatenate([np.stack(pair, axis=1) for pair in pairs])


def _chains(links: NDArray[np.intp], count: int) -> list[list[int]]:
    """Maximal chains through vertices of degree 2; a ring without branches starts and ends at its lowest vertex."""
    sources = links.ravel()
    order = np.argsort(sources, kind="stable")
    neighbours = links[:, ::-1].ravel()[order].tolist()
    degrees = np.bincount(sources, minlength=count)
    first = (np.cumsum(degrees) - degrees).tolist()
    degree = degrees.tolist()
    seen = bytearray(count)

    def walk(start: int, step: int) -> list[int]:
        chain = [start, step]
        while degree[step] == 2 and step != start:
            seen[step] = 1
            at = first[step]
            step = neighbours[at] if neighbours[at] != chain[-2] else neighbours[at + 1]
            chain.append(step)
        return chain

    chains = [
        walk(node, neighbour)
        for node in np.flatnonzero((degrees != 2) & (degrees > 0)).tolist()
        for neighbour in neighbours[first[node] : first[node] + degree[node]]
        if not seen[neighbour] and (degree[neighbour] == 2 or node < neighbour)
    ]
    for vertex in np.flatnonzero(degrees == 2).tolist():
        if not seen[vertex]:
            seen[vertex] = 1
            chains.append(walk(vertex, neighbours[first[vertex]]))
    return chains


def merge_chains(edges: Sequence[Edge]) -> list[Edge]:
    """Join the two edges at every node where only two meet; a ring of such edges becomes one edge."""
    meeting: defaultdict[int, list[int]] = defaultdict(list)
    for index, edge in enumerate(edges):
        meeting[edge.start].append(index)
        meeting[edge.end].append(index)
    done = [False] * len(edges)

    def walk(index: int, edge: Edge) -> Edge:
        paths, start = [edge.path], edge.start
        done[index] = True
        while len(meeting[edge.end]) == 2 and edge.end != start:
            a, b = meeting[edge.end]
            index = b if a == index else a
            done[index] = True
            edge = edges[index] if edges[index].start == edge.end else edges[index].reversed()
            paths.append(edge.path[1:])
        return Edge(start, edge.end, np.concatenate(paths))

    merged = [
        walk(index, end)
        for index, edge in enumerate(edges)
        for end in (edge, edge.reversed())
        if not done[index] and len(meeting[end.start]) != 2
    ]
    merged.extend(walk(index, edge) for index, edge in enumerate(edges) if not done[index])
    return merged


def prune_spurs(edges: Sequence[Edge], radius: NDArray[np.float32], *, ratio: float) -> list[Edge]:
    """Remove dead ends that stick out of a line by less than `ratio` times that line's width, until none is left.

    Args:
        edges: Of a skeleton.
        radius: (height, width); the mask's distance transform in pixels.
        ratio: 1 removes what sticks out by less than one width.
    """
    kept = list(edges)
    while kept:
        names, nodes = np.unique([(edge.start, edge.end) for edge in kept], return_inverse=True)
        nodes = nodes.reshape(-1, 2)
        degree = np.bincount(nodes.ravel())[nodes]
        at_ends = look_up(radius, np.concatenate([edge.path[[0, -1]] for edge in kept])).reshape(-1, 2)
        tip, base = np.where(degree[:, :1] == 1, at_ends, at_ends[:, ::-1]).T
        # Near the corner of an end the junction itself is narrow: the width is that of the widest line there.
        widest = np.zeros(len(names), dtype=np.float32)
        np.maximum.at(widest, nodes, _mean_radii(kept, radius)[:, None])
        width = 2 * np.maximum(base, widest[nodes].max(axis=1))
        protrusion = np.array([edge.length for edge in kept]) + tip - base
        spur = (degree.min(axis=1) == 1) & (degree.max(axis=1) > 2) & (protrusion < ratio * width)
        if not spur.any():
            break
        kept = merge_chains([edge for edge, drop in zip(kept, spur, strict=True) if not drop])
    return kept


def _mean_radii(edges: Sequence[Edge], radius: NDArray[np.float32]) -> NDArray[np.float32]:
    """Mean radius along each edge."""
    counts = np.array([len(edge.path) for edge in edges])
    along = look_up(radius, np.concatenate([edge.path for edge in edges]))
    return np.asarray(np.add.reduceat(along, np.cumsum(counts) - counts) / counts, dtype=np.float32)


def contract_junctions(edges: Sequence[Edge], radius: NDArray[np.float32]) -> list[Edge]:
    """Make one node of branching points that lie close together, and lead every edge straight into its node.

    The skeleton of two lines that cross has two branching points, and near a junction it leaves the lines' middle. The
    disc of a branching point lies in the mask: a node is moved only within the discs of all its points, and an edge is
    straight from there to where it leaves its point's disc.

    Args:
        edges: Of a skeleton.
        radius: (height, width); the mask's distance transform in pixels.
    """
    degrees = _node_degrees(edges)
    points = {edge.start: edge.path[0] for edge in edges} | {edge.end: edge.path[-1] for edge in edges}
    points = {node: point for node, point in points.items() if degrees[node] > 2}
    if not points:
        return list(edges)
    reaches = look_up(radius, np.array(list(points.values()))).tolist()
    discs = {node: _Disc(point, reach) for (node, point), reach in zip(points.items(), reaches, strict=True)}
    clusters = {node: [node] for node in points}  # one list for all nodes of a cluster

    contracted = set()
    between = [index for index, edge in enumerate(edges) if edge.start in discs and edge.end in discs]
    for index in sorted(between, key=lambda index: edges[index].length):
        edge = edges[index]
        cluster, other = clusters[edge.start], clusters[edge.end]
        if cluster is other or edge.length > discs[edge.start].reach + discs[edge.end].reach:
            continue
        members = [discs[node] for node in (*cluster, *other)]
        middle = np.mean([disc.centre for disc in members], axis=0)
        if all(np.hypot(*(middle - disc.centre)) <= _WELL_INSIDE * disc.reach for disc in members):
            contracted.add(index)
            cluster.extend(other)
            clusters.update(dict.fromkeys(other, cluster))

    centres = {node: np.mean([points[member] for member in cluster], axis=0) for node, cluster in clusters.items()}
    names = {node: cluster[0] for node, cluster in clusters.items()}
    left = [edge for index, edge in enumerate(edges) if index not in contracted]
    ends = [frozenset((names.get(edge.start, edge.start), names.get(edge.end, edge.end))) for edge in left]
    counts = Counter(ends)
    return [
        Edge(
            names.get(edge.start, edge.start),
            names.get(edge.end, edge.end),
            _led_into_nodes(edge, discs, centres, straight=len(pair) == 2 and counts[pair] == 1),
        )
        for edge, pair in zip(left, ends, strict=True)
    ]


@dataclass(frozen=True)
class _Disc:
    """The largest disc in the mask around a branching point."""

    centre: Points
    """x, y in pixels."""
    reach: float
    """Radius in pixels."""


def _led_into_nodes(edge: Edge, discs: dict[int, _Disc], centres: dict[int, Points], *, straight: bool) -> Points:
    """The edge's path from node to node; if `straight`, without its vertices in the discs of its ends."""
    first, last = 1, len(edge.path) - 1
    if straight and edge.start in discs:
        first = _first_outside(edge.path, discs[edge.start])
    if straight and edge.end in discs:
        last = len(edge.path) - _first_outside(edge.path[::-1], discs[edge.end])
    head, tail = centres.get(edge.start, edge.path[0]), centres.get(edge.end, edge.path[-1])
    return np.concatenate([head[None], edge.path[first:last], tail[None]])


def _first_outside(path: Points, disc: _Disc) -> int:
    """Index of the first vertex outside the disc; the number of vertices where there is none."""
    outside = np.hypot(*(path - disc.centre).T) > disc.reach
    return int(outside.argmax()) if outside.any() else len(path)


def extend_ends(edges: Sequence[Edge], mask: NDArray[np.uint8], radius: NDArray[np.float32]) -> list[Edge]:
    """Let dead ends run straight on to the mask's edge, or the raster's.

    Thinning shortens an end by about half the width and bends its last pixels to a corner: those are replaced.

    Args:
        edges: Of a skeleton.
        mask: (height, width), 0 or 1.
        radius: (height, width); the mask's distance transform in pixels.
    """
    degrees = _node_degrees(edges)
    extended = []
    for edge in edges:
        path = edge.path
        at_start, at_end = degrees[edge.start] == 1, degrees[edge.end] == 1
        local = float(np.median(look_up(radius, path))) if at_start or at_end else 0.0
        if at_end:
            path = _extended(path, mask, local)
        if at_start:
            path = _extended(path[::-1], mask, local)[::-1]
        extended.append(Edge(edge.start, edge.end, path))
    return extended


def _extended(path: Points, mask: NDArray[np.uint8], radius: float) -> Points:
    """The path with its last pixels replaced by a straight run to the mask's edge, unless that is clearly shorter."""
    along = np.concatenate([[0.0], np.cumsum(_steps(path))])
    length = along[-1]
    for cut in (min(_BENT_RADII * radius, length / 3), 0.0):
        base = int(np.searchsorted(along, length - cut, side="right")) - 1
        behind = int(np.searchsorted(along, along[base] - _HEADING_RADII * radius))
        heading = _unit(path[base] - path[min(behind, base - 1)])
        tip = _ray_end(path[base], heading, mask, reach=length - along[base] + 2 * radius + 2)
        if np.hypot(*(tip - path[base])) > _STRAIGHT_SHARE * (length - along[base]):
            return np.concatenate([path[: base + 1], tip[None]])
    return path


def _ray_end(origin: Points, direction: Points, mask: NDArray[np.uint8], *, reach: float) -> Points:
    """Last point of the ray in the mask, at most `reach` away; on the raster's border where the ray leaves there."""
    height, width = mask.shape
    ray = origin + np.arange(0.0, reach, _RAY_STEP)[:, None] * direction
    on_raster = np.clip(ray, 0.0, (width, height))
    outside = (look_up(mask, ray) == 0) | (on_raster != ray).any(axis=1)
    last = int(outside.argmax()) if outside.any() else len(ray) - 1
    leaves_raster = (on_raster[last] != ray[last]).any() and look_up(mask, ray[last : last + 1])[0]
    tip: Points = on_raster[last] if leaves_raster else ray[max(last - 1, 0)]
    return tip


def bridge_gaps(
    edges: Sequence[Edge],
    mask: NDArray[np.uint8],
    valid: NDArray[np.bool_],
    *,
    gap: float,
    max_turn: float,
    heading: float,
) -> tuple[list[Edge], list[Edge]]:
    """Join dead ends that look at each other, the nearest first.

    The last vertex of an extended end lies anywhere on the mask's ragged edge: directions are taken, and bridges built,
    from the vertex before.

    Args:
        edges: With their ends extended to where the mask ends.
        mask: (height, width), 0 or 1; a bridge crosses nothing else of the mask.
        valid: (height, width); a bridge crosses no pixel without data.
        gap: Longest bridge, in pixels.
        max_turn: Largest angle between either line and the bridge, in degrees.
        heading: Length at a line's end that tells its direction, in pixels.

    Returns:
        The edges, shortened where a bridge begins, and the bridges.
    """
    degrees = _node_degrees(edges)
    ends = [end for edge in edges for end in (edge, edge.reversed()) if degrees[end.end] == 1]
    if gap <= 0 or len(ends) < 2:
        return list(edges), []
    tips = shapely.points([end.path[-1] for end in ends])
    a, b = shapely.STRtree(tips).query(tips, predicate="dwithin", distance=gap)
    a, b = a[a < b], b[a < b]
    bases = np.array([end.path[-2] for end in ends])
    directions = np.array([_heading(end.path[:-1] if len(end.path) > 2 else end.path, heading) for end in ends])
    across = bases[b] - bases[a]
    across /= np.maximum(np.hypot(*across.T), 1e-9)[:, None]
    towards = np.minimum((directions[a] * across).sum(axis=1), -(directions[b] * across).sum(axis=1))
    fits = np.flatnonzero(towards >= np.cos(np.radians(max_turn)))
    apart = shapely.distance(tips[a], tips[b])
    joined: set[int] = set()
    bridges = []
    for pair in fits[np.argsort(apart[fits], kind="stable")].tolist():
        i, j = int(a[pair]), int(b[pair])
        bridge = Edge(ends[i].end, ends[j].end, np.array([_bridgehead(ends[i]), _bridgehead(ends[j])]))
        across_gap = _between(ends[i].path[-1], ends[j].path[-1], margin=1.5)
        if (
            joined.isdisjoint((i, j))
            and not look_up(mask, across_gap).any()
            and look_up(valid, _between(*bridge.path, margin=0.0)).all()
        ):
            joined.update((i, j))
            bridges.append(bridge)
    bridged = {ends[i].end for i in joined}
    return [_cut_back(edge, bridged) for edge in edges], bridges


def _bridgehead(end: Edge) -> Points:
    """Where a bridge from the last vertex of an edge begins: the vertex before, unless that is the edge's other end."""
    return np.asarray(end.path[-2] if len(end.path) > 3 else end.path[-1])


def _cut_back(edge: Edge, bridged: set[int]) -> Edge:
    """The edge without its vertices beyond bridgeheads."""
    if len(edge.path) <= 3:
        return edge
    return Edge(edge.start, edge.end, edge.path[edge.start in bridged : len(edge.path) - (edge.end in bridged)])


def _heading(path: Points, length: float) -> Points:
    """Direction of the path's last `length` pixels."""
    along = np.concatenate([[0.0], np.cumsum(_steps(path))])
    behind = int(np.searchsorted(along, along[-1] - length, side="right")) - 1
    return _unit(path[-1] - path[max(min(behind, len(path) - 2), 0)])


def _between(start: Points, end: Points, *, margin: float) -> Points:
    """Points half a pixel apart between two points, but not within the margin of either, (n, 2)."""
    length = float(np.hypot(*(end - start)))
    along = np.arange(margin, length - margin, 0.5)[:, None] / max(length, 1e-9)
    return np.asarray(start + along * (end - start))


def drop_short_components(edges: Sequence[Edge], *, shortest: float) -> list[Edge]:
    """Remove each connected piece of the network that is shorter in all than `shortest` pixels."""
    parents: dict[int, int] = {}

    def root(node: int) -> int:
        while (parent := parents.setdefault(node, node)) != node:
            parents[node] = parents[parent]
            node = parent
        return node

    for edge in edges:
        parents[root(edge.start)] = root(edge.end)
    lengths: defaultdict[int, float] = defaultdict(float)
    for edge in edges:
        lengths[root(edge.start)] += edge.length
    return [edge for edge in edges if lengths[root(edge.start)] >= shortest]


def _steps(path: Points) -> Points:
    return np.asarray(np.hypot(*np.diff(path, axis=0).T))


def _unit(vector: Points) -> Points:
    return vector / max(float(np.hypot(*vector)), 1e-9)
