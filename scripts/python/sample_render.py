"""Draws a town as 8-bit red, green, blue and near-infrared pixels of one US survey foot.

Every window of the pixel grid can be drawn by itself and fits its neighbours exactly: the grid is drawn in fixed
blocks, and textures and noise are looked up by the place in it. Blocks also bound the memory.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import rasterio.features
import shapely
from shapely.affinity import scale
from shapely.ops import substring

from sample_colours import ASPHALT, CARS, CROWNS, GRAVEL, GROUND, OLD_ASPHALT, PAINT, ROOFS, SIDEWALK, Colour
from sample_town import House, Sidewalk, Town

__all__ = ["METRES_PER_PIXEL", "Renderer", "footprint"]

METRES_PER_PIXEL = 1200 / 3937  # the US survey foot

SHIFT = 4  # OpenCV draws on a grid of 1/16 pixel
SUPERSAMPLING = 4
BLOCK_PX = 500
MARGIN_PX = 64  # what stands outside a block may reach in with its shadow
SUN = np.array([0.75, -0.55])  # shadow of one metre of height, in metres east and north
SHADE = np.array([0.50, 0.54, 0.58, 0.54])  # brightness in shadow; blue skylight fills in
NOISE = 2.2  # standard deviation of the sensor noise, in 8-bit steps
OVERHANG_M = 0.15  # of tree crowns over a sidewalk's edge
TEXTURE_PX = 1021  # prime, so that repeats of the textures do not fall together

Float = npt.NDArray[np.float32]
Byte = npt.NDArray[np.uint8]


def footprint(sidewalks: Iterable[Sidewalk], shrink_m: float = 0.0) -> list[Any]:
    """Returns the polygons that the sidewalks cover: flat at their ends, without notches where lines of a ring meet."""
    sidewalks = list(sidewalks)
    lines = np.array([sidewalk.line for sidewalk in sidewalks], dtype=object)
    radii = np.array([sidewalk.width_m / 2 - shrink_m for sidewalk in sidewalks])
    ends: dict[tuple[float, float], list[float]] = {}
    for line, radius in zip(lines, radii, strict=True):
        for end in (line.coords[0], line.coords[-1]):
            ends.setdefault(end, []).append(radius)
    joints = [shapely.Point(end).buffer(min(widths)) for end, widths in ends.items() if len(widths) > 1]
    return [*shapely.buffer(lines, radii, cap_style="flat"), *joints]


class Renderer:
    """Draws windows of one town; ``seed`` decides textures, colours and noise."""

    def __init__(self, town: Town, seed: int) -> None:
        rng = np.random.default_rng([seed, 1])
        self._speckle = rng.standard_normal((5, TEXTURE_PX, TEXTURE_PX), dtype=np.float32)
        crowns = town.trees.radii_m
        self._crown_colours = rng.integers(len(CROWNS), size=len(crowns))
        self._crown_heights = crowns * rng.uniform(1.2, 2.0, len(crowns))
        self._town = town
        self._roads = shapely.union_all([street.line.buffer(street.width_m / 2) for street in town.streets])
        self._old_road = rng.random(len(town.streets)) < 0.35
        self._streets = shapely.STRtree([street.line for street in town.streets])
        self._houses = shapely.STRtree([house.outline for house in town.houses])
        self._drives = shapely.STRtree([house.drive for house in town.houses if house.drive is not None])
        self._cars = shapely.STRtree([car.outline for car in town.cars])
        self._trees = shapely.STRtree(shapely.points(town.trees.centres))
        self._sidewalks = shapely.STRtree(footprint(town.sidewalks))
        self._sidewalk_cores = shapely.STRtree(footprint(town.sidewalks, shrink_m=OVERHANG_M))

    def draw(self, *, column: int, row: int, width: int, height: int) -> Byte:
        """Draws a window whose first pixel is (column, row) from the scene's centre, as (4, height, width) uint8."""
        pixels = np.empty((4, height, width), np.uint8)
        for top in range(row - row % BLOCK_PX, row + height, BLOCK_PX):
            for left in range(column - column % BLOCK_PX, column + width, BLOCK_PX):
                block = self._block(left, top)
                rows, columns = slice(max(row, top), row + height), slice(max(column, left), column + width)
                part = block[:, rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
                _, high, wide = part.shape
                first_row, first_column = rows.start - row, columns.start - column
                pixels[:, first_row : first_row + high, first_column : first_column + wide] = part
        return pixels

    def _block(self, column: int, row: int) -> Byte:
        """Draws one block of the grid, as (4, BLOCK_PX, BLOCK_PX) uint8."""
        canvas = _Canvas(column - MARGIN_PX, row - MARGIN_PX, BLOCK_PX + 2 * MARGIN_PX)
        houses = [self._town.houses[index] for index in canvas.inside(self._houses)]
        trees = canvas.inside(self._trees)
        pixels = self._ground(canvas)
        self._draw_roads(canvas, pixels)
        image = pixels.astype(np.float32)
        covered = canvas.coverage(self._sidewalks)[..., None]
        image += covered * (np.array(SIDEWALK, np.float32) - image)
        shadow = self._shadows(canvas, houses, trees)
        roofs, roof_alpha = self._roof_layer(canvas, houses)
        image += roof_alpha[..., None] * (roofs - image)
        crowns, crown_alpha = self._crown_layer(canvas, trees)
        image += (crown_alpha * (1 - canvas.coverage(self._sidewalk_cores)))[..., None] * (crowns - image)
        # Shadows fall on the ground; what throws them stays lit.
        shadow *= (1 - roof_alpha) * (1 - crown_alpha)
        image *= 1 - shadow[..., None] * (1 - SHADE.astype(np.float32))
        image *= (1 + 0.035 * self._texture(canvas, 0, cell_px=1.7) + 0.03 * self._texture(canvas, 1, 23))[..., None]
        image += NOISE * canvas.lookup(self._speckle[1:]).transpose(1, 2, 0)
        inner = image[MARGIN_PX:-MARGIN_PX, MARGIN_PX:-MARGIN_PX]
        return np.ascontiguousarray(np.rint(inner).clip(0, 255).astype(np.uint8).transpose(2, 0, 1))

    def _texture(self, canvas: "_Canvas", layer: int, cell_px: float) -> Float:
        """Returns smooth noise with a standard deviation near 1 and blobs of about a size, (height, width)."""
        y, x = canvas.rows / cell_px, canvas.columns / cell_px
        across = cv2.remap(
            self._speckle[layer],
            *np.meshgrid((x % TEXTURE_PX).astype(np.float32), (y % TEXTURE_PX).astype(np.float32)),
            cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_WRAP,
        )
        return np.asarray(across * 1.5, np.float32)

    def _ground(self, canvas: "_Canvas") -> Byte:
        """Mixes grass, dry grass and soil in soft patches, (height, width, 4) uint8."""
        colours = np.array(GROUND, np.float32)
        patches = self._texture(canvas, 2, 90) + 0.5 * self._texture(canvas, 3, 31) + 0.35 * self._texture(canvas, 4, 5)
        dry = (patches * 0.3 + 0.3).clip(0, 1)[..., None]
        bare = ((self._texture(canvas, 0, 61) + 0.5 * self._texture(canvas, 1, 9)) * 0.5 - 0.5).clip(0, 1)[..., None]
        ground = colours[0] + dry * (colours[1] - colours[0])
        ground += bare * (colours[2] - ground)
        return np.asarray(np.rint(ground).astype(np.uint8))

    def _draw_roads(self, canvas: "_Canvas", pixels: Byte) -> None:
        """Paints drives, carriageways, their markings and parked cars."""
        for index in canvas.inside(self._drives):
            canvas.fill(pixels, self._drives.geometries[index], GRAVEL if index % 3 else OLD_ASPHALT)
        roads = shapely.clip_by_rect(self._roads, *canvas.bounds)
        canvas.fill(pixels, roads, ASPHALT)
        streets = canvas.inside(self._streets)
        for index in streets[self._old_road[streets]]:
            street = self._town.streets[index]
            canvas.fill(pixels, street.line.buffer(street.width_m / 2, cap_style="flat"), OLD_ASPHALT)
        for index in streets:
            street = self._town.streets[index]
            if street.width_m > 8:
                middle = substring(street.line, 0.1, 0.9, normalized=True)
                canvas.fill(pixels, middle.buffer(0.15, cap_style="flat"), PAINT)
        for index in canvas.inside(self._cars):
            car = self._town.cars[index]
            canvas.fill(pixels, car.outline.buffer(0.2), CARS[car.colour])
            windows = car.outline.buffer(-0.45)
            canvas.fill(pixels, windows, CARS[1])
            canvas.fill(pixels, scale(windows, 0.55, 0.55), CARS[car.colour])

    def _roof_layer(self, canvas: "_Canvas", houses: Sequence[House]) -> tuple[Float, Float]:
        """Paints hipped roofs, the sides towards the sun brighter, and returns them with their coverage."""
        pixels, alpha = canvas.blank(4), canvas.blank()
        for house in houses:
            corners = np.array(house.outline.exterior.coords[:4])
            canvas.fill(alpha, house.outline, 255)
            canvas.fill(pixels, house.outline.buffer(0.4), ROOFS[house.roof])
            for side, brightness in _hips(corners):
                canvas.fill(pixels, side, _shaded(ROOFS[house.roof], brightness))
        return pixels.astype(np.float32), _share(alpha)

    def _crown_layer(self, canvas: "_Canvas", trees: npt.NDArray[np.intp]) -> tuple[Float, Float]:
        """Paints tree crowns as clumps that are bright where the sun is, and returns them with their coverage."""
        pixels, alpha = canvas.blank(4), canvas.blank()
        for index in trees:
            centre, radius = self._town.trees.centres[index], self._town.trees.radii_m[index]
            colour = CROWNS[self._crown_colours[index]]
            rng = np.random.default_rng(int(index))
            turns = rng.uniform(0, 2 * np.pi, 7)
            clumps = centre + np.column_stack([np.cos(turns), np.sin(turns)]) * radius * rng.uniform(0.3, 0.6, (7, 1))
            for clump in (centre, *clumps):
                canvas.disc(alpha, clump, radius * 0.55, 255)
                canvas.disc(pixels, clump, radius * 0.55 + 0.3, _shaded(colour, 0.8))
            for clump, brightness in zip(clumps, rng.uniform(0.95, 1.3, 7), strict=True):
                canvas.disc(pixels, clump - SUN * radius * 0.12, radius * 0.36, _shaded(colour, float(brightness)))
        return pixels.astype(np.float32), _share(alpha)

    def _shadows(self, canvas: "_Canvas", houses: Sequence[House], trees: npt.NDArray[np.intp]) -> Float:
        """Returns how much of each pixel lies in the shadow of a house or a tree, 0 to 1."""
        shadow = canvas.blank()
        for house in houses:
            corners = np.array(house.outline.exterior.coords[:4])
            thrown = shapely.MultiPoint([*corners, *(corners + SUN * house.height_m)]).convex_hull
            canvas.fill(shadow, thrown, 255)
        for index in trees:
            centre, radius = self._town.trees.centres[index], self._town.trees.radii_m[index]
            for part in (0.4, 0.7, 1.0):
                canvas.disc(shadow, centre + SUN * self._crown_heights[index] * part, radius * (1.1 - 0.25 * part), 255)
        return _share(np.asarray(cv2.GaussianBlur(shadow, (0, 0), 0.8), np.uint8))


class _Canvas:
    """A window of the pixel grid that geometries in metres are drawn on."""

    def __init__(self, column: int, row: int, size: int) -> None:
        self._left_top = (column, row)
        self._shape = (size, size)
        self.columns = np.arange(column, column + size)
        self.rows = np.arange(row, row + size)
        left, top = column * METRES_PER_PIXEL, -row * METRES_PER_PIXEL
        self.bounds = (left, top - size * METRES_PER_PIXEL, left + size * METRES_PER_PIXEL, top)

    def inside(self, tree: shapely.STRtree) -> npt.NDArray[np.intp]:
        """Returns the indices of a tree's geometries that touch the window, in their own order."""
        return np.asarray(np.sort(tree.query(shapely.box(*self.bounds))))

    def blank(self, channels: int | None = None) -> Byte:
        """Returns zeros, (height, width) or (height, width, channels) uint8."""
        return np.zeros(self._shape if channels is None else (*self._shape, channels), np.uint8)

    def lookup(self, textures: Float) -> Float:
        """Cuts the window out of textures (n, size, size) that repeat over the whole grid."""
        return textures[:, (self.rows % TEXTURE_PX)[:, None], self.columns % TEXTURE_PX]

    def fill(self, pixels: Byte, geometry: Any, colour: Colour | int) -> None:
        """Fills a (multi)polygon with smooth edges."""
        rings = [
            self._to_grid(shapely.get_coordinates(ring))
            for part in shapely.get_parts(geometry)
            for ring in _rings(part)
        ]
        if rings:
            cv2.fillPoly(pixels, rings, colour, cv2.LINE_AA, SHIFT)

    def disc(self, pixels: Byte, centre: npt.NDArray[np.float64], radius_m: float, colour: Colour | int) -> None:
        """Fills a circle with smooth edges."""
        # Plain numbers: arrays of two would take most of a tile's time.
        unit = 2**SHIFT / METRES_PER_PIXEL
        x = round(float(centre[0]) * unit - 2**SHIFT / 2) - self._left_top[0] * 2**SHIFT
        y = round(float(-centre[1]) * unit - 2**SHIFT / 2) - self._left_top[1] * 2**SHIFT
        cv2.circle(pixels, (x, y), round(radius_m * unit), colour, -1, cv2.LINE_AA, SHIFT)

    def coverage(self, tree: shapely.STRtree) -> Float:
        """Returns the share of each pixel that a tree's polygons cover, (height, width), to 1/16."""
        chosen = tree.geometries[self.inside(tree)]
        if not len(chosen):
            return np.zeros(self._shape, np.float32)
        step = METRES_PER_PIXEL / SUPERSAMPLING
        fine = rasterio.features.rasterize(
            chosen,
            out_shape=tuple(size * SUPERSAMPLING for size in self._shape),
            transform=rasterio.Affine(step, 0, self.bounds[0], 0, -step, self.bounds[3]),
            default_value=255,
            dtype=np.uint8,
        )
        return _share(np.asarray(cv2.resize(fine, self._shape[::-1], interpolation=cv2.INTER_AREA), np.uint8))

    def _to_grid(self, xy: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
        """Converts metres to OpenCV's fixed-point pixels, whose whole numbers are pixel centres."""
        grid = np.rint((xy * (1, -1) / METRES_PER_PIXEL - 0.5) * 2**SHIFT)
        return np.asarray((grid - np.array(self._left_top) * 2**SHIFT).astype(np.int32))


def _share(alpha: Byte) -> Float:
    return np.asarray(alpha.astype(np.float32) / np.float32(255))


def _rings(polygon: Any) -> list[Any]:
    return [] if polygon.is_empty else [polygon.exterior, *polygon.interiors]


def _shaded(colour: Colour, brightness: float) -> Colour:
    red, green, blue, nir = (min(255, round(value * brightness)) for value in colour)
    return red, green, blue, nir


def _hips(corners: npt.NDArray[np.float64]) -> Iterable[tuple[shapely.Polygon, float]]:
    """Yields the four sides of a hipped roof over a rectangle (4, 2), with their brightness in the sun."""
    longer = np.linalg.norm(corners[1] - corners[0]) >= np.linalg.norm(corners[2] - corners[1])
    first, second, third, fourth = corners if longer else np.roll(corners, 1, axis=0)
    half = np.linalg.norm(fourth - first) / 2
    along = (second - first) / np.linalg.norm(second - first)
    start, end = (first + fourth) / 2 + along * half, (second + third) / 2 - along * half
    for side in (
        [first, second, end, start],
        [third, fourth, start, end],
        [second, third, end],
        [fourth, first, start],
    ):
        outward = (side[0] + side[1]) / 2 - corners.mean(axis=0)
        yield shapely.Polygon(side), 0.95 - 0.15 * float(outward @ SUN / np.linalg.norm(outward) / np.linalg.norm(SUN))
