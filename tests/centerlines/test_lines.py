"""Mask to lines, against networks that were drawn into the mask by shapely and rasterio."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import cv2
import numpy as np
import pytest
import rasterio.features
import rasterio.transform
import shapely
from numpy.typing import NDArray
from shapely.geometry import LineString, Point
from shapely.geometry.base import BaseGeometry

from centerlines.compare import compare_networks, loops_kept
from centerlines.georeference import PixelSize
from centerlines.lines import Line, LineSettings, clean_mask, extract_lines

FOOT = 0.3048
SQUARE = PixelSize(FOOT, FOOT)

Mask = NDArray[np.uint8]


def draw(shapes: Sequence[BaseGeometry], *, width: int, height: int, pixel: PixelSize = SQUARE) -> Mask:
    """A mask (height, width) of shapes in metres, y downwards from the raster's upper edge."""
    transform = rasterio.transform.Affine(pixel.x, 0, 0, 0, pixel.y, 0)
    mask: Mask = rasterio.features.rasterize(
        shapes, out_shape=(height, width), transform=transform, default_value=1, dtype="uint8"
    )
    return mask


def extract(mask: Mask, *, pixel: PixelSize = SQUARE, settings: LineSettings | None = None) -> list[Line]:
    """Lines of a mask whose probability is the mask itself."""
    return extract_lines(mask, mask.astype(np.float32), pixel_size=pixel, settings=settings or LineSettings())


def in_metres(lines: Sequence[Line], pixel: PixelSize = SQUARE) -> list[LineString]:
    """The lines in the coordinates of `draw`."""
    return [LineString(line.xy * (pixel.x, pixel.y)) for line in lines]


def sidewalk(*points: tuple[float, float], width: float = 1.6) -> BaseGeometry:
    """A sidewalk with square ends."""
    return LineString(points).buffer(width / 2, cap_style="flat")


def street_network(extent: float, *, seed: int) -> list[LineString]:
    """A crooked grid of straight and curved streets with some missing, some diagonals and some dead ends, in metres.

    It reaches beyond the extent, so that streets cross its border rather than run along it.
    """
    rng = np.random.default_rng(seed)
    size = round(extent / 28) + 2
    nodes = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), axis=-1) - 0.5
    nodes = nodes * (extent / (size - 2)) + rng.uniform(-4, 4, nodes.shape)
    streets = []
    for x in range(size):
        for y in range(size):
            for dx, dy, share in ((1, 0, 0.9), (0, 1, 0.9), (1, 1, 0.06)):
                if x + dx < size and y + dy < size and rng.random() < share:
                    start, end = nodes[x, y], nodes[x + dx, y + dy]
                    t = np.linspace(0, 1, 12)[:, None]
                    across = (end - start)[::-1] * (-1, 1) * rng.uniform(-0.06, 0.06)
                    street = start + t * (end - start) + 4 * t * (1 - t) * across
                    streets.append(LineString(street))
                    if rng.random() < 0.12:
                        streets.append(LineString([street[8], street[8] + (end - start)[::-1] * (-0.4, 0.4)]))
    return list(shapely.get_parts(shapely.union_all(streets)))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "pixel",
    [SQUARE, PixelSize(0.1, 0.1), PixelSize(0.23, 0.3)],
    ids=["one foot", "10 cm", "taller than wide"],
)
def test_a_drawn_network_is_found_again(pixel: PixelSize, seed: int) -> None:
    """The whole point: from a perfect mask the sidewalks come back where they are, joined as they are."""
    extent = 280.0 if pixel.x > 0.2 else 140.0
    truth = street_network(extent, seed=seed)
    rng = np.random.default_rng(seed)
    shapes = [line.buffer(rng.uniform(1.3, 2.0) / 2) for line in truth]
    width, height = round(extent / pixel.x), round(extent / pixel.y)
    mask = draw(shapes, width=width, height=height, pixel=pixel)
    area = shapely.box(0, 0, width * pixel.x, height * pixel.y)
    settings = LineSettings(gap_m=0)

    mask = clean_mask(mask.astype(np.float32), mask >= 0, threshold=0.5, pixel_size=pixel, settings=settings)
    found = in_metres(extract(mask, pixel=pixel, settings=settings), pixel)

    result = compare_networks(found, truth, buffer_m=0.5, area=area)
    assert result.quality >= 0.985
    loops = loops_kept(found, truth, area=area, line_width_m=2.0, smallest_hole_m2=2.0)
    assert loops.kept == loops.total > 5
    assert all(line.is_simple for line in found)


def test_a_ragged_mask_keeps_its_loops() -> None:
    """A model's mask has ragged edges and specks: neither may add dead ends by the dozen or open a loop."""
    truth = street_network(240.0, seed=4)
    size = round(240 / FOOT)
    mask = draw([line.buffer(0.85) for line in truth], width=size, height=size)
    noise = cv2.GaussianBlur(np.random.default_rng(4).normal(size=mask.shape).astype(np.float32), (0, 0), 1.5)
    probability = cv2.GaussianBlur(mask.astype(np.float32), (0, 0), 1.0) + 0.1 * noise / noise.std()
    settings = LineSettings()
    mask = clean_mask(probability, np.ones(mask.shape, dtype=bool), threshold=0.5, pixel_size=SQUARE, settings=settings)

    found = in_metres(extract_lines(mask, probability, pixel_size=SQUARE, settings=settings))

    area = shapely.box(0, 0, 240, 240)
    result = compare_networks(found, truth, buffer_m=0.5, area=area)
    assert result.quality >= 0.97
    assert result.found.dead_ends <= result.truth.dead_ends + 2
    loops = loops_kept(found, truth, area=area, line_width_m=2.0, smallest_hole_m2=2.0)
    assert loops.kept == loops.total > 20


@pytest.fixture(scope="module")
def network() -> tuple[Mask, list[Line]]:
    """A mask with a network and its lines."""
    size = round(200 / FOOT)
    mask = draw([line.buffer(0.8) for line in street_network(200.0, seed=7)], width=size, height=size)
    return mask, extract(mask, settings=LineSettings(gap_m=0))


def test_lines_that_meet_share_their_vertex(network: tuple[Mask, list[Line]]) -> None:
    """A router joins lines by equal coordinates: a last digit that differs is a broken network."""
    places: dict[int, set[tuple[float, ...]]] = {}
    for line in network[1]:
        places.setdefault(line.start_node, set()).add(tuple(line.xy[0]))
        places.setdefault(line.end_node, set()).add(tuple(line.xy[-1]))
    assert all(len(vertices) == 1 for vertices in places.values())
    assert len(set.union(*places.values())) == len(places)


def test_no_two_lines_join_at_a_node_of_their_own(network: tuple[Mask, list[Line]]) -> None:
    """A sidewalk between two junctions is one feature, not a chain of pieces."""
    ends = Counter(node for line in network[1] for node in (line.start_node, line.end_node))
    assert 2 not in ends.values()


def test_lines_stay_in_the_mask(network: tuple[Mask, list[Line]]) -> None:
    """Smoothing and simplifying must not take a short cut over a lawn."""
    mask, lines = network
    points = shapely.get_coordinates([LineString(line.xy).segmentize(0.2) for line in lines])
    columns, rows = np.minimum(points.astype(int), np.array(mask.shape[::-1]) - 1).T
    outside = cv2.distanceTransform(1 - mask, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)[rows, columns]
    assert (outside > 0).mean() < 0.001
    assert outside.max() <= 1.0


def test_lines_are_the_same_every_time(network: tuple[Mask, list[Line]]) -> None:
    """A tile that is done again after a crash must give the same file."""
    again = extract(network[0], settings=LineSettings(gap_m=0))
    assert len(again) == len(network[1])
    for one, other in zip(again, network[1], strict=True):
        np.testing.assert_array_equal(one.xy, other.xy)
        assert (one.start_node, one.end_node, one.length_m) == (other.start_node, other.end_node, other.length_m)


def test_straight_sidewalks_have_few_vertices() -> None:
    """A line that follows the pixel grid's steps is long, ugly and heavy."""
    (line,) = extract(draw([sidewalk((5, 5), (55, 22))], width=200, height=100))
    assert len(line.xy) <= 3
    assert line.length_m == pytest.approx(np.hypot(50, 17), abs=0.5)


@pytest.mark.parametrize("pixels", [2, 3, 4, 5, 6, 7])
def test_a_line_lies_in_the_middle_of_its_strip(pixels: int) -> None:
    """Thinning is half a pixel off on even widths, which shifts a whole tile's sidewalks to one side."""
    mask = np.zeros((40, 120), dtype=np.uint8)
    mask[10 : 10 + pixels, 20:100] = 1
    (line,) = extract(mask)
    middle = line.xy[1:-1] if len(line.xy) > 2 else line.xy
    assert np.abs(middle[:, 1] - (10 + pixels / 2)).max() <= 0.5
    assert sorted(line.xy[[0, -1], 0]) == pytest.approx([20, 100], abs=0.2)
    assert line.width_m == pytest.approx(pixels * FOOT, abs=0.05)


@pytest.mark.parametrize("angle", [4, 17, 45, 80, 123])
@pytest.mark.parametrize("width", [1.3, 1.7, 3.0])
def test_width_and_ends_are_those_of_the_sidewalk(width: float, angle: float) -> None:
    """Thinning alone ends half a width early, and a distance to pixel centres is half a pixel off."""
    along = 20 * np.array([np.cos(np.radians(angle)), np.sin(np.radians(angle))])
    truth = LineString(np.add((30.1, 30.2), [-along, along]))
    (line,) = extract(draw([truth.buffer(width / 2, cap_style="flat")], width=200, height=200))
    assert line.width_m == pytest.approx(width, abs=0.06)
    assert line.length_m == pytest.approx(40, abs=0.5)
    assert in_metres([line])[0].hausdorff_distance(truth) <= 0.5


def test_confidence_is_the_probability_along_the_line() -> None:
    """It tells a reader which lines to look at first."""
    mask = draw([sidewalk((5, 10), (55, 10))], width=200, height=66)
    probability = np.where(np.arange(200) < 100, 0.6, 0.8).astype(np.float32) * mask
    (line,) = extract_lines(mask, probability, pixel_size=SQUARE, settings=LineSettings())
    assert line.confidence == pytest.approx(0.7, abs=0.02)


def test_a_ring_without_junctions_is_a_closed_line() -> None:
    """A path around a pond has no end to start from."""
    mask = draw([Point(30, 30).buffer(20).exterior.buffer(0.8)], width=200, height=200)
    (line,) = extract(mask)
    assert line.start_node == line.end_node
    np.testing.assert_array_equal(line.xy[0], line.xy[-1])
    assert line.length_m == pytest.approx(2 * np.pi * 20, rel=0.01)


@pytest.mark.parametrize("hole", [1.5, 3.0, 12.0])
def test_both_ways_around_a_hole_stay(hole: float) -> None:
    """Two lines between the same two junctions are a loop, even if nearly alike: around a tree, or a traffic island."""
    around = Point(30, 15).buffer(hole / 2)
    path = LineString([(5, 15), (55, 15)]).buffer(0.8).union(around.buffer(1.4)).difference(around)
    lines = extract(draw([path], width=200, height=100))
    ends = Counter(frozenset((line.start_node, line.end_node)) for line in lines)
    assert max(ends.values()) == 2
    assert len(lines) == 4
    assert len(shapely.get_parts(shapely.polygonize(in_metres(lines)))) == 1


@pytest.mark.parametrize("name", ["ones", "zeros", "checkerboard", "noise"])
@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 3), (1, 60), (60, 1), (5, 200), (64, 64), (90, 70)]
)
@pytest.mark.parametrize(
    "settings",
    [LineSettings(), LineSettings(spur_ratio=0, gap_m=0, shortest_m=0, tolerance_m=0)],
    ids=["default", "nothing dropped"],
)
def test_any_mask_gives_sound_lines(name: str, height: int, width: int, settings: LineSettings) -> None:
    """A tile of a few pixels or a model gone wild must not stop the run or write a broken geometry."""
    mask = {
        "ones": np.ones((height, width)),
        "zeros": np.zeros((height, width)),
        "checkerboard": np.indices((height, width)).sum(axis=0) % 2,
        "noise": np.random.default_rng(0).random((height, width)) < 0.6,
    }[name].astype(np.uint8)
    for pixel in (SQUARE, PixelSize(0.2, 0.3)):
        for line in extract(mask, pixel=pixel, settings=settings):
            assert line.xy.shape[0] >= 2
            assert np.hypot(*np.diff(line.xy, axis=0).T).min() > 0
            assert line.length_m > 0
            assert line.width_m > 0
            assert 0 <= line.confidence <= 1
            assert line.xy.min() >= 0
            assert (line.xy <= (width, height)).all()
            assert (line.start_node == line.end_node) == (line.xy[0] == line.xy[-1]).all()


@pytest.mark.parametrize("seed", range(5))
def test_a_mask_of_noise_keeps_every_hole_as_a_loop(seed: int) -> None:
    """Loops are counted from the graph and from the mask's holes: thinning, pruning and contracting must lose none."""
    noise = cv2.GaussianBlur(np.random.default_rng(seed).normal(size=(150, 150)), (0, 0), 2.0)
    mask: Mask = np.where(noise > 0, 1, 0).astype(np.uint8)
    settings = LineSettings(plaza_width_m=100.0, gap_m=0, shortest_m=0)
    lines = extract(mask, settings=settings)
    _, labels = cv2.connectedComponents(np.pad(1 - mask, 1, constant_values=1), connectivity=4)
    holes = len(np.unique(labels[labels > 0])) - 1
    assert loops_of(lines) == holes > 10


def loops_of(lines: Sequence[Line]) -> int:
    """Independent cycles by the node ids alone: the edges that join what is already joined."""
    group = {node: node for line in lines for node in (line.start_node, line.end_node)}
    loops = 0
    for line in lines:
        start, end = group[line.start_node], group[line.end_node]
        loops += start == end
        group = {node: start if name == end else name for node, name in group.items()}
    return loops


def test_an_area_wider_than_a_plaza_has_no_lines_and_sidewalks_end_at_it() -> None:
    """The skeleton of a parking lot is a spider web."""
    lot = shapely.box(20, 20, 42, 40)
    found = in_metres(extract(draw([lot, sidewalk((2, 30), (22, 30))], width=200, height=200)))
    (line,) = found
    assert line.distance(lot) <= 1.0
    assert line.intersection(lot).length <= 0.5
    assert extract(draw([Point(30, 30).buffer(20)], width=200, height=200)) == []


@pytest.mark.parametrize("angle", [0, 20, 40, 65, 90, 110, 135, 160])
def test_a_line_reaches_the_border_of_the_raster(angle: float) -> None:
    """The next tile goes on there: a line that stops short leaves a gap at every seam."""
    along = 100 * np.array([np.cos(np.radians(angle)), np.sin(np.radians(angle))])
    truth = LineString(np.add((26, 33), [-along, along]))
    size = 200
    area = shapely.box(0, 0, size * FOOT, size * FOOT)
    (line,) = in_metres(extract(draw([truth.buffer(0.8)], width=size, height=size)))
    for end in (0, -1):
        assert Point(line.coords[end]).distance(area.boundary) <= 0.05
    assert line.hausdorff_distance(truth.intersection(area)) <= 0.5


def test_a_sidewalk_along_the_border_stays_in_the_middle_of_what_is_seen() -> None:
    """Continuing it over the border would draw its line outside the raster, or lose it."""
    mask = np.zeros((50, 300), dtype=np.uint8)
    mask[:6] = 1
    (line,) = extract(mask)
    np.testing.assert_allclose(line.xy[:, 1], 3.0, atol=0.6)
    assert line.length_m == pytest.approx(300 * FOOT, abs=0.2)


def test_corners_and_bumps_grow_no_branches_but_real_stubs_stay() -> None:
    """Dead ends at every notch of the mask would drown the real ones."""
    corner = LineString([(5, 5), (40, 5), (40, 40)]).buffer(0.9, cap_style="flat", join_style="mitre")
    bump = shapely.box(20, 5, 21.5, 6.7)
    stub = sidewalk((40, 25), (43.5, 25))
    assert len(extract(draw([corner, bump], width=200, height=200))) == 1
    assert len(extract(draw([corner, bump, stub], width=200, height=200))) == 3


def test_lines_that_cross_meet_in_one_node() -> None:
    """The skeleton of a crossing has two branching points with a short line between them."""
    mask = draw([sidewalk((5, 10), (55, 45), width=2), sidewalk((5, 45), (55, 12), width=2)], width=200, height=200)
    lines = extract(mask)
    assert len(lines) == 4
    assert sorted(Counter(node for line in lines for node in (line.start_node, line.end_node)).values()) == [1] * 4 + [
        4
    ]


@pytest.mark.parametrize(
    ("gap", "turn", "lines"),
    [(2.5, 0, 1), (3.5, 15, 1), (6.0, 0, 2), (3.0, 90, 2)],
    ids=["short", "slightly bent", "too long", "around a corner"],
)
def test_a_gap_is_bridged_if_its_ends_look_at_each_other(gap: float, turn: float, lines: int) -> None:
    """A tree over a sidewalk hides it, but two sidewalks that only come near are not one."""
    rise = np.radians(turn)
    first, begin = sidewalk((5, 30), (25, 30)), np.array([25 + gap, 30.0])
    second = sidewalk(tuple(begin), tuple(begin + 20 * np.array([np.cos(rise), np.sin(rise)])))
    found = extract(draw([first, second], width=200, height=200))
    assert len(found) == lines
    assert sum(line.length_m for line in found) == pytest.approx(40 + (gap if lines == 1 else 0), abs=1)


def test_no_gap_is_bridged_over_missing_data() -> None:
    """Nothing may be drawn where the image shows nothing."""
    mask = draw([sidewalk((5, 30), (25, 30)), sidewalk((27, 30), (50, 30))], width=200, height=200)
    valid = np.ones(mask.shape, dtype=bool)
    valid[:, 85] = False
    lines = extract_lines(mask, mask.astype(np.float32), pixel_size=SQUARE, settings=LineSettings(), valid=valid)
    assert len(lines) == 2
    assert len(extract(mask)) == 1


def test_short_pieces_of_network_are_dropped_but_not_short_lines_of_a_long_one() -> None:
    """A speck is noise; a two-metre link between two sidewalks is not."""
    speck = sidewalk((50, 50), (52, 50), width=1)
    ladder = [sidewalk((5, 10), (50, 10)), sidewalk((5, 14), (50, 14)), sidewalk((25, 10), (25, 14))]
    lines = extract(draw([speck, *ladder], width=200, height=200))
    assert len(lines) == 5
    assert extract(draw([speck], width=200, height=200)) == []


def test_pixels_of_any_shape_give_the_same_length() -> None:
    """In a CRS in degrees a pixel is narrower than high: lengths must not depend on it."""
    ring = Point(30, 30).buffer(20).exterior.buffer(0.8)
    for pixel in (PixelSize(0.2, 0.2), PixelSize(0.15, 0.2), PixelSize(0.3, 0.17)):
        mask = draw([ring], width=round(60 / pixel.x), height=round(60 / pixel.y), pixel=pixel)
        (line,) = extract(mask, pixel=pixel)
        assert line.length_m == pytest.approx(2 * np.pi * 20, rel=0.01)
        assert line.width_m == pytest.approx(1.6, abs=0.06)
        assert in_metres([line], pixel)[0].hausdorff_distance(Point(30, 30).buffer(20).exterior) < 0.5


@pytest.mark.parametrize("size", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_a_pixel_without_size_is_refused(size: tuple[float, float]) -> None:
    """A CRS whose unit was not understood must not end in a division by zero somewhere else."""
    with pytest.raises(ValueError, match=r"pixel size .* must be positive and finite"):
        PixelSize(*size)


def cleaned(probability: NDArray[np.float32], valid: NDArray[np.bool_] | None = None) -> Mask:
    """The mask at threshold 0.5 with one-metre pixels; nothing is closed, 5 m2 kept, 3 m2 filled."""
    settings = LineSettings(closing_m=0, smallest_region_m2=5, smallest_hole_m2=3)
    valid = np.ones(probability.shape, dtype=bool) if valid is None else valid
    return clean_mask(probability, valid, threshold=0.5, pixel_size=PixelSize(1, 1), settings=settings)


def test_small_regions_are_dropped_and_small_holes_filled() -> None:
    """Specks would become lines and pinholes would become loops."""
    probability = np.zeros((20, 20), dtype=np.float32)
    probability[1:3, 1:3] = 0.9
    probability[5:18, 5:18] = 0.5
    probability[7, 7:9] = 0.4
    probability[12, 10:13] = 0.4
    expected = np.zeros((20, 20), dtype=np.uint8)
    expected[5:18, 5:18] = 1
    expected[12, 10:13] = 0
    np.testing.assert_array_equal(cleaned(probability), expected)


def test_nothing_is_drawn_where_there_is_no_data() -> None:
    """Neither closing nor filling may reach into pixels that the image lacks."""
    probability = np.full((20, 20), 0.9, dtype=np.float32)
    valid = np.ones((20, 20), dtype=bool)
    valid[:, 8:10] = False
    probability[15, 15] = np.nan
    mask = cleaned(probability, valid)
    assert not mask[~valid].any()
    assert mask[valid].all()


def test_single_pixels_without_data_do_not_tear_a_line_into_a_web() -> None:
    """Glare on a sidewalk has the nodata value of many photos; a hole for each pixel would be a loop for each."""
    strip = draw([LineString([(5, 15), (55, 15)]).buffer(0.9)], width=200, height=100)
    valid = np.random.default_rng(0).random(strip.shape) > 0.03
    probability = np.where(valid, strip * np.float32(0.9), 0).astype(np.float32)
    settings = LineSettings()
    mask = clean_mask(probability, valid, threshold=0.5, pixel_size=SQUARE, settings=settings)
    (line,) = extract_lines(mask, probability, pixel_size=SQUARE, settings=settings, valid=valid)
    (whole,) = extract(strip)
    assert line.length_m == pytest.approx(whole.length_m, abs=0.6)


def test_closing_goes_by_metres() -> None:
    """The same crack closes at 10 cm pixels and at one-foot pixels."""
    for pixel, crack in ((SQUARE, 1), (PixelSize(0.1, 0.1), 3)):
        probability = np.ones((100, 100), dtype=np.float32)
        probability[:, 50 : 50 + crack] = 0
        mask = clean_mask(
            probability, np.ones((100, 100), dtype=bool), threshold=0.5, pixel_size=pixel, settings=LineSettings()
        )
        assert mask.all()


def test_an_empty_tile_has_an_empty_mask() -> None:
    """A tile without sidewalks or without data is ordinary."""
    assert not cleaned(np.zeros((7, 9), dtype=np.float32)).any()
    assert not cleaned(np.ones((7, 9), dtype=np.float32), np.zeros((7, 9), dtype=bool)).any()
    assert cleaned(np.ones((7, 9), dtype=np.float32)).all()
