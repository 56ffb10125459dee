"""A town of sidewalks, houses and trees grown round real street lines: geometry only, no pixels.

Coordinates are metres east and north of the scene's centre. The sidewalks run along both sides of the streets, as the
smoothed edge of the streets' buffer, which makes a ring round every block; crossings join the rings, gaps and short
paths to houses give them dead ends. Lines meet only in shared vertices, so equal coordinates are the network's nodes.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyproj
import shapely
from shapely.geometry import LineString, Point, Polygon, box

from sample_colours import CARS, ROOFS

__all__ = ["Car", "House", "Sidewalk", "Street", "StreetDataError", "Town", "Trees", "build_town", "read_streets"]

Array = npt.NDArray[np.float64]
Generator = np.random.Generator

NO_STREETS = ("footway", "path", "pedestrian", "track", "steps", "cycleway")
STREET_WIDTH_M = {"primary": 10.0, "secondary": 10.0, "tertiary": 9.0}
OTHER_STREET_WIDTH_M = 8.0
VERGE_M = 2.6  # from the kerb to the middle of the sidewalk
CORNER_RADIUS_M = 3.0  # and half the least distance between two sidewalks of a block
SMALLEST_BLOCK_M2 = 300.0
CROSSING_WIDTH_M = 1.8
PATH_WIDTH_M = 1.3
CLEARANCE_M = 6.0  # between junctions and ends along a sidewalk
REACH_M = 150.0  # streets so far outside the window still shape blocks inside


class StreetDataError(Exception):
    """The street data cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Street:
    """A street between two junctions."""

    line: LineString
    """Middle of the street."""
    width_m: float
    """Width of the carriageway."""

    @property
    def offset_m(self) -> float:
        """Distance from the middle of the street to the middle of its sidewalks."""
        return self.width_m / 2 + VERGE_M


@dataclass(frozen=True)
class Sidewalk:
    """One line of the network, from node to node."""

    line: LineString
    """Middle of the sidewalk."""
    width_m: float
    """Constant width."""
    kind: Literal["sidewalk", "crossing", "path"]
    """Beside a street, over a street, or to a house."""


@dataclass(frozen=True)
class House:
    """A rectangular house and its drive."""

    outline: Polygon
    """Rectangle whose first two vertices are the street front."""
    height_m: float
    """Height, for the shadow."""
    roof: int
    """Index of the roof's colour."""
    drive: Polygon | None
    """From the street to the house, if there is one."""


@dataclass(frozen=True)
class Car:
    """A parked car."""

    outline: Polygon
    """Rectangle."""
    colour: int
    """Index of the car's colour."""


@dataclass(frozen=True)
class Trees:
    """All trees, one row each."""

    centres: Array
    """Middle of the crowns, (n, 2) float64."""
    radii_m: Array
    """Radius of the crowns, (n,) float64."""


@dataclass(frozen=True)
class Town:
    """Everything that is drawn."""

    streets: tuple[Street, ...]
    """Carriageways."""
    sidewalks: tuple[Sidewalk, ...]
    """The truth."""
    houses: tuple[House, ...]
    """Houses with their drives."""
    cars: tuple[Car, ...]
    """Parked cars."""
    trees: Trees
    """Trees."""


@dataclass
class _Ring:
    """A closed sidewalk that is still to be divided at its junctions."""

    xy: Array
    """Vertices, the first repeated at the end, (n, 2)."""
    width_m: float
    """Width of the sidewalk."""
    breaks: list[float] = field(default_factory=list)
    """Distances from the first vertex at which the ring is divided."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Stretches without sidewalk, as distances from the first vertex; they do not pass it."""

    def __post_init__(self) -> None:
        self.distances = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(self.xy, axis=0).T))])
        self.length = float(self.distances[-1])

    def point(self, distance: float) -> Array:
        """Returns the point at a distance from the first vertex, (2,)."""
        distance %= self.length
        return np.array([np.interp(distance, self.distances, self.xy[:, axis]) for axis in (0, 1)])

    def direction(self, distance: float, reach_m: float = 0.5) -> Array:
        """Returns the unit vector along the ring, (2,)."""
        chord = self.point(distance + reach_m) - self.point(distance - reach_m)
        return np.asarray(chord / np.hypot(*chord))

    def is_free(self, distance: float) -> bool:
        """Tells whether a junction fits here: off the gaps and clear of every other junction."""
        if any(start <= distance <= end for start, end in self.gaps):
            return False
        apart = np.abs(np.array(self.breaks) - distance)
        return bool((np.minimum(apart, self.length - apart) >= CLEARANCE_M).all())

    def divide(self) -> list[Array]:
        """Returns the pieces between the breaks, without the gaps, each (n, 2)."""
        if not self.breaks:
            return [self.xy]
        breaks = np.unique(self.breaks)
        stations = np.union1d(self.distances[:-1], breaks)
        stations = np.concatenate([stations[stations >= breaks[0]], stations[stations < breaks[0]], breaks[:1]])
        points = np.array([self.point(station) for station in stations])
        cuts = [*np.flatnonzero(np.isin(stations[:-1], breaks)), len(stations) - 1]
        gap_starts = {start for start, _ in self.gaps}
        return [
            points[first : last + 1] for first, last in itertools.pairwise(cuts) if stations[first] not in gap_starts
        ]


def read_streets(path: Path) -> list[Street]:
    """Reads the street lines of a GeoParquet file, in true metres about the densest junction.

    Raises:
        StreetDataError: The file is not GeoParquet or holds no street lines.
    """
    try:
        table = pq.read_table(path)
        geometry_column = json.loads(table.schema.metadata[b"geo"])["primary_column"]
        column = json.loads(table.schema.metadata[b"geo"])["columns"][geometry_column]
        crs = pyproj.CRS.from_user_input(column.get("crs") or "OGC:CRS84")
        lines = shapely.from_wkb(table[geometry_column].to_numpy())
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException, pyproj.exceptions.CRSError) as error:
        raise StreetDataError(
            f"street data {path} cannot be read as GeoParquet: {str(error).splitlines()[0]}"
        ) from error
    kinds = table["highway"].to_pylist() if "highway" in table.column_names else [""] * len(lines)
    chosen = [
        (line, STREET_WIDTH_M.get(kind, OTHER_STREET_WIDTH_M))
        for line, kind in zip(lines, kinds, strict=True)
        if kind not in NO_STREETS and isinstance(line, LineString) and line.length > 0
    ]
    if not chosen:
        raise StreetDataError(f"street data {path} holds no street lines; give a file with LineString geometries")
    local = _true_metres([line for line, _ in chosen], crs)
    return [Street(line, width) for line, (_, width) in zip(local, chosen, strict=True)]


def _true_metres(lines: Sequence[LineString], crs: pyproj.CRS) -> list[LineString]:
    """Projects lines to metres about their densest junction (azimuthal equidistant: no stretch at town size)."""
    left, bottom, right, top = shapely.total_bounds(lines)
    to_degrees = pyproj.Transformer.from_crs(crs, "EPSG:4326", always_xy=True)
    lon, lat = to_degrees.transform((left + right) / 2, (bottom + top) / 2)
    plane = pyproj.CRS.from_dict({"proj": "aeqd", "lon_0": lon, "lat_0": lat, "datum": "WGS84"})
    to_plane = pyproj.Transformer.from_crs(crs, plane, always_xy=True)
    projected = shapely.transform(list(lines), lambda xy: np.column_stack(to_plane.transform(xy[:, 0], xy[:, 1])))
    junctions = np.array([xy for xy, legs in _legs(projected).items() if len(legs) > 2] or [(0.0, 0.0)])
    apart = np.hypot(*(junctions[:, None] - junctions[None]).transpose(2, 0, 1))
    centre = junctions[(apart < 600).sum(axis=1).argmax()]
    return list(shapely.transform(projected, lambda xy: xy - centre))


def _legs(lines: Iterable[LineString]) -> dict[tuple[float, float], list[tuple[int, LineString]]]:
    """Returns the lines that leave each end point, as (index, line from that point), keyed by the point to 1 cm."""
    legs: dict[tuple[float, float], list[tuple[int, LineString]]] = defaultdict(list)
    for index, line in enumerate(lines):
        for leg in (line, line.reverse()):
            x, y = leg.coords[0]
            legs[round(x, 2), round(y, 2)].append((index, leg))
    return legs


def build_town(streets: Sequence[Street], window: tuple[float, float, float, float], seed: int) -> Town:
    """Grows the town of a window (west, south, east, north); the same arguments give the same town."""
    rings_rng, crossings_rng, lots_rng, cars_rng, trees_rng = np.random.default_rng(seed).spawn(5)
    area = box(*window)
    streets = _streets_around(streets, area.buffer(REACH_M))
    zone = _street_zone(streets)
    rings = [_ring(line, rings_rng) for line in _outlines(zone)]
    crossings = _crossings(streets, zone, rings, crossings_rng)
    houses, paths = _lots(rings, zone, lots_rng)
    along = [Sidewalk(LineString(xy), ring.width_m, "sidewalk") for ring in rings for xy in ring.divide()]
    near = area.buffer(30)
    sidewalks = [sidewalk for sidewalk in (*along, *crossings, *paths) if sidewalk.line.intersects(near)]
    houses = [house for house in houses if house.outline.intersects(near)]
    cars = _cars([street for street in streets if street.line.intersects(near)], sidewalks, cars_rng)
    trees = _trees(near.bounds, streets, sidewalks, houses, trees_rng)
    return Town(tuple(streets), tuple(sidewalks), tuple(houses), tuple(cars), trees)


def _streets_around(streets: Sequence[Street], area: Polygon) -> list[Street]:
    """Returns the streets that touch an area, the town mirrored at its sides as often as the area needs."""
    lines = np.array([street.line for street in streets])
    low, high = shapely.total_bounds(lines).reshape(2, 2)
    size = np.maximum(high - low, 1.0)
    first, last = np.floor((np.array(area.bounds).reshape(2, 2) - low) / size).astype(int)
    found = []
    for column in range(first[0], last[0] + 1):
        for row in range(first[1], last[1] + 1):
            copy = np.array([column, row])
            mirrored = shapely.transform(
                lines, lambda xy, copy=copy: np.where(copy % 2, low + high - xy, xy) + copy * size
            )
            found += [
                Street(mirrored[index], streets[index].width_m)
                for index in np.flatnonzero(shapely.intersects(mirrored, area)).tolist()
            ]
    return found


def _street_zone(streets: Sequence[Street]) -> Any:
    """Returns the ground between the sidewalks' middle lines, with round corners and no narrow strips between."""
    zone = shapely.union_all([street.line.buffer(street.offset_m) for street in streets])
    return zone.buffer(CORNER_RADIUS_M).buffer(-CORNER_RADIUS_M).simplify(0.01)


def _outlines(zone: Any) -> list[LineString]:
    """Returns the rings of a (multi)polygon that go round something large enough to be a block."""
    return [
        ring
        for part in shapely.get_parts(zone)
        for ring in (part.exterior, *part.interiors)
        if Polygon(ring).area >= SMALLEST_BLOCK_M2
    ]


def _ring(line: LineString, rng: Generator) -> _Ring:
    """Makes a ring of random width; most rings of a block's length stay whole, long ones get gaps."""
    ring = _Ring(shapely.get_coordinates(line), width_m=round(float(rng.uniform(1.3, 2.0)), 2))
    for _ in range(rng.poisson(ring.length / 1200)):
        start, length = rng.uniform(0, ring.length), rng.uniform(25, 70)
        end = start + length
        inside = start > CLEARANCE_M and end < ring.length - CLEARANCE_M
        if inside and all(end + 30 < other[0] or other[1] + 30 < start for other in ring.gaps):
            ring.gaps.append((start, end))
            ring.breaks += [start, end]
    return ring


def _crossings(streets: Sequence[Street], zone: Any, rings: Sequence[_Ring], rng: Generator) -> list[Sidewalk]:
    """Draws crossings over some legs of some junctions, each square to its street, and breaks the rings for them."""
    ring_lines = [LineString(ring.xy) for ring in rings]
    tree = shapely.STRtree(ring_lines)
    shapely.prepare(zone)
    crossings: list[Sidewalk] = []
    for _, legs in sorted(_legs(street.line for street in streets).items()):
        if len(legs) < 3 or rng.random() < 0.35:
            continue
        reach = max(streets[index].offset_m for index, _ in legs) + CORNER_RADIUS_M
        for index, leg in legs:
            if rng.random() < 0.3:
                continue
            span = _span(leg, streets[index].offset_m, reach, zone)
            if span is None or any(span.distance(other.line) < CLEARANCE_M for other in crossings):
                continue
            ends = [(int(tree.nearest(end)), end) for end in map(Point, span.coords)]
            places = [(rings[number], float(ring_lines[number].project(end))) for number, end in ends]
            if all(ring.is_free(distance) for ring, distance in places):
                points = [ring.point(distance) for ring, distance in places]
                crossings.append(Sidewalk(LineString(points), CROSSING_WIDTH_M, "crossing"))
                for ring, distance in places:
                    ring.breaks.append(distance)
    return crossings


def _span(leg: LineString, offset_m: float, reach_m: float, zone: Any) -> LineString | None:
    """Returns the line square to a street, between its sidewalks, nearest to the junction but clear of its corners."""
    for distance in np.arange(reach_m + 1, min(reach_m + 12, leg.length - 15), 1.5):
        middle = np.array(leg.interpolate(distance).coords[0])
        along = np.array(leg.interpolate(distance + 0.5).coords[0]) - middle
        across = np.array([-along[1], along[0]]) / np.hypot(*along) * (offset_m + 5)
        pieces = shapely.get_parts(zone.intersection(LineString([middle - across, middle + across])))
        span = min(pieces, key=Point(middle).distance)
        if abs(span.length - 2 * offset_m) < 0.2:
            return span
    return None


def _lots(rings: Sequence[_Ring], zone: Any, rng: Generator) -> tuple[list[House], list[Sidewalk]]:
    """Builds houses along the rings, some with a drive and some with a path, and breaks the rings for the paths."""
    houses: list[House] = []
    doors: list[tuple[_Ring, float, Array, float]] = []
    for ring in rings:
        station = float(rng.uniform(8, 20))
        while station < ring.length - 8:
            width, depth, setback = rng.uniform(9, 15), rng.uniform(8, 12), rng.uniform(6, 11)
            with_drive, side = rng.random() < 0.6, rng.choice([-1, 1])
            roof, height = int(rng.integers(len(ROOFS))), float(rng.uniform(3.5, 7))
            along = ring.direction(station, reach_m=7)
            if along @ ring.direction(station + 6) > 0.98 and along @ ring.direction(station - 6) > 0.98:
                inward = _away_from(zone, ring.point(station), along)
                front = ring.point(station) + inward * setback
                outline = _rectangle(front, along, inward, width, depth)
                drive_middle = ring.point(station) + along * side * (width / 2 - 1.6) - inward * (VERGE_M + 0.5)
                drive = _rectangle(drive_middle, along, inward, 2.8, setback + VERGE_M + 0.5) if with_drive else None
                houses.append(House(outline, height, roof, drive))
                doors.append((ring, station, inward, setback))
            station += float(width + rng.uniform(5, 18))
    kept = _apart(houses, zone)
    paths = []
    for index in kept:
        ring, station, inward, setback = doors[index]
        if rng.random() < 0.3 and ring.is_free(station):
            ring.breaks.append(station)
            start = ring.point(station)
            paths.append(Sidewalk(LineString([start, start + inward * (setback - 0.5)]), PATH_WIDTH_M, "path"))
    return [houses[index] for index in kept], paths


def _away_from(zone: Any, point: Array, along: Array) -> Array:
    """Returns the unit vector square to a line on the zone's edge, pointing out of the zone."""
    left = np.array([-along[1], along[0]])
    return -left if zone.intersects(Point(point + left)) else left


def _rectangle(front: Array, along: Array, inward: Array, width: float, depth: float) -> Polygon:
    """Returns a rectangle that starts with its front edge, whose middle is given."""
    side, back = along * width / 2, inward * depth
    return Polygon([front - side, front + side, front + side + back, front - side + back])


def _apart(houses: Sequence[House], zone: Any) -> list[int]:
    """Returns the indices of houses that keep clear of the streets and of each other, the earlier house winning."""
    outlines = np.array([house.outline for house in houses], dtype=object)
    clear = ~shapely.dwithin(outlines, zone, 3.0) if len(outlines) else np.zeros(0, bool)
    kept: list[int] = []
    taken = ~clear
    pairs = shapely.STRtree(outlines).query(outlines, predicate="dwithin", distance=2.5)
    neighbours = defaultdict(list)
    for first, second in pairs.T:
        neighbours[int(first)].append(int(second))
    for index in range(len(houses)):
        if not taken[index]:
            kept.append(index)
            taken[neighbours[index]] = True
    return kept


def _cars(streets: Sequence[Street], sidewalks: Sequence[Sidewalk], rng: Generator) -> list[Car]:
    """Parks cars along the kerbs, off the crossings."""
    cars = []
    for street in streets:
        for station in np.arange(12, street.line.length - 12, 7.0):
            if rng.random() > 0.12:
                continue
            middle, ahead = (np.array(street.line.interpolate(at).coords[0]) for at in (station, station + 0.5))
            along = (ahead - middle) / np.hypot(*(ahead - middle))
            across = np.array([-along[1], along[0]]) * rng.choice([-1, 1])
            kerb = middle + across * (street.width_m / 2 - 2.2)
            cars.append(Car(_rectangle(kerb, along, across, 4.6, 1.8), int(rng.integers(len(CARS)))))
    outlines = [car.outline for car in cars]
    lines = shapely.STRtree([sidewalk.line for sidewalk in sidewalks])
    blocked = set(lines.query(outlines, predicate="dwithin", distance=1.5)[0].tolist()) if cars else set()
    return [car for index, car in enumerate(cars) if index not in blocked]


def _trees(
    bounds: tuple[float, float, float, float],
    streets: Sequence[Street],
    sidewalks: Sequence[Sidewalk],
    houses: Sequence[House],
    rng: Generator,
) -> Trees:
    """Plants trees wherever no street, sidewalk or house is in the way of the trunk."""
    west, south, east, north = bounds
    count = int((east - west) * (north - south) * 0.006)
    centres = rng.uniform((west, south), (east, north), (count, 2))
    radii = rng.gamma(6, 0.5, count).clip(1.2, 6)
    trunks = shapely.points(centres)
    blocked: set[int] = set()
    for obstacles, distance in (
        ([street.line for street in streets], OTHER_STREET_WIDTH_M / 2 + 1),
        ([sidewalk.line for sidewalk in sidewalks], 1.6),
        ([house.outline for house in houses], 1.5),
    ):
        blocked.update(shapely.STRtree(obstacles).query(trunks, predicate="dwithin", distance=distance)[0].tolist())
    free = np.array([index for index in range(count) if index not in blocked], dtype=np.intp)
    return Trees(centres[free], radii[free])
