"""The comparison of a network with a truth, against answers counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import shapely
import shapely.ops
from shapely.geometry import LineString, box

from centerlines.compare import NetworkShape, compare_networks, loops_kept, network_shape


def grid(columns: int, rows: int, *, spacing: float = 20.0, shift: float = 0.0) -> list[LineString]:
    """Streets of a grid with so many streets each way, whole and so not joined where they cross."""
    width, height = spacing * (columns - 1), spacing * (rows - 1)
    return [
        *(LineString([(x * spacing + shift, shift), (x * spacing + shift, height + shift)]) for x in range(columns)),
        *(LineString([(shift, y * spacing + shift), (width + shift, y * spacing + shift)]) for y in range(rows)),
    ]


def noded(lines: list[LineString]) -> list[LineString]:
    """The same lines, cut wherever they cross."""
    return list(shapely.get_parts(shapely.union_all(lines)))


def test_a_network_compared_with_itself_is_complete_and_correct() -> None:
    """A measure that is not 1 for a perfect result could never be reached."""
    result = compare_networks(noded(grid(4, 3)), grid(4, 3), buffer_m=0.5)
    assert (result.completeness, result.correctness, result.quality) == pytest.approx((1, 1, 1))
    assert result.found_length_m == result.truth_length_m == pytest.approx(4 * 40 + 3 * 60)
    assert result.found == result.truth


def test_lines_match_within_the_buffer_and_not_beyond() -> None:
    """The buffer is what the quality is quoted at: one that is half or twice as wide changes every figure."""
    truth = [LineString([(0, 0), (100, 0)])]
    near, far = [LineString([(0, 0.45), (100, 0.45)])], [LineString([(0, 0.55), (100, 0.55)])]
    assert compare_networks(near, truth, buffer_m=0.5).quality == pytest.approx(1, abs=0.01)
    assert compare_networks(far, truth, buffer_m=0.5).quality == 0


def test_quality_follows_from_completeness_and_correctness() -> None:
    """A third of the truth missing and a third of the result wrong must not look the same as one of both."""
    truth = [LineString([(0, 0), (300, 0)])]
    found = [LineString([(0, 0), (200, 0)]), LineString([(0, 50), (100, 50)])]
    result = compare_networks(found, truth, buffer_m=0.5)
    assert result.completeness == pytest.approx(2 / 3, abs=0.002)
    assert result.correctness == pytest.approx(2 / 3, abs=0.002)
    assert result.quality == pytest.approx(200 / 400, abs=0.003)


def test_a_line_drawn_twice_counts_once() -> None:
    """Otherwise a result could gain correctness by repeating what it is sure of."""
    truth = [LineString([(0, 0), (100, 0)])]
    found = [*truth, *truth, LineString([(0, 50), (100, 50)])]
    assert compare_networks(found, truth, buffer_m=0.5).correctness == pytest.approx(0.5)


def test_only_what_lies_in_the_area_is_measured() -> None:
    """A tile is judged by its own lines: the truth reaches over its edge."""
    truth, found = grid(6, 6), [LineString([(0, 20), (50, 20)])]
    result = compare_networks(found, truth, buffer_m=0.5, area=box(10, 10, 50, 30))
    assert result.truth_length_m == pytest.approx(40 + 2 * 20)
    assert result.found_length_m == pytest.approx(40)
    assert result.completeness == pytest.approx(0.5, abs=0.03)
    assert result.correctness == pytest.approx(1)


@pytest.mark.parametrize(
    ("found", "truth", "expected"),
    [([], [], (1, 1)), ([], grid(2, 2), (0, 1)), (grid(2, 2), [], (1, 0))],
    ids=["neither", "nothing found", "nothing to find"],
)
def test_an_empty_side_is_no_error(
    found: list[LineString], truth: list[LineString], expected: tuple[float, float]
) -> None:
    """A tile without sidewalks is ordinary."""
    result = compare_networks(found, truth, buffer_m=0.5)
    assert (result.completeness, result.correctness) == expected
    assert loops_kept(found, truth).kept == 0
    assert network_shape([]) == NetworkShape(components=0, dead_ends=0, loops=0)


@pytest.mark.parametrize(("columns", "rows"), [(2, 2), (3, 4), (7, 5)])
def test_a_grid_has_a_loop_a_block_however_its_lines_are_cut(columns: int, rows: int) -> None:
    """Truth data is often drawn street by street: whether it is cut at crossings must not matter."""
    expected = NetworkShape(components=1, dead_ends=0, loops=(columns - 1) * (rows - 1))
    assert network_shape(grid(columns, rows)) == expected
    assert network_shape(noded(grid(columns, rows))) == expected


def test_loops_are_the_bounded_faces_of_a_random_network() -> None:
    """By Euler's formula both counts agree for every planar network; the faces are counted by shapely."""
    rng = np.random.default_rng(5)
    lines = [LineString(ends) for ends in rng.uniform(0, 200, (40, 2, 2))]
    faces = shapely.get_parts(shapely.polygonize(noded(lines)))
    assert network_shape(lines).loops == len(faces) > 50


def test_a_shattered_network_keeps_its_quality_but_not_its_shape() -> None:
    """This is why the shape is reported: by length alone a network cut at every junction looks nearly perfect."""
    truth = noded(grid(4, 4))
    found = [shapely.ops.substring(line, 0.4, line.length - 0.4) for line in truth]
    result = compare_networks(found, truth, buffer_m=0.5)
    assert result.quality > 0.95
    assert result.truth == NetworkShape(components=1, dead_ends=0, loops=9)
    assert result.found == NetworkShape(components=24, dead_ends=48, loops=0)


def test_dead_ends_are_ends_where_nothing_else_is() -> None:
    """A street that ends at another one is a T, not a dead end."""
    tee = [LineString([(0, 0), (40, 0)]), LineString([(20, 0), (20, 30)])]
    assert network_shape(tee) == NetworkShape(components=1, dead_ends=3, loops=0)


def test_an_end_at_the_edge_of_the_area_is_no_dead_end() -> None:
    """A sidewalk that leaves the tile goes on in the next one."""
    lines = [LineString([(-10, 5), (100, 5)]), LineString([(20, 5), (20, 99.8)])]
    assert network_shape(lines, area=box(0, 0, 50, 100), border_m=0.5).dead_ends == 0
    assert network_shape(lines, area=box(0, 0, 50, 120), border_m=0.5).dead_ends == 1


@pytest.mark.parametrize(("gap", "components"), [(0.0, 1), (0.04, 1), (0.2, 2)])
def test_ends_that_nearly_touch_are_joined(gap: float, components: int) -> None:
    """Coordinates that went through a file or a projection differ in their last digits."""
    lines = [LineString([(0, 0.123), (10, 0.123)]), LineString([(10 + gap, 0.123), (20, 0.123)])]
    assert network_shape(lines).components == components


def test_a_closed_line_is_one_loop_without_ends() -> None:
    """A path around a pond meets nothing."""
    assert network_shape([LineString(shapely.Point(0, 0).buffer(20).exterior)]) == NetworkShape(1, 0, 1)


def test_a_loop_drawn_a_little_off_is_kept() -> None:
    """Lines half a metre off still go around the same block."""
    result = loops_kept(grid(4, 4, shift=0.5), grid(4, 4))
    assert (result.kept, result.total) == (9, 9)


def test_a_loop_that_lost_a_side_is_not_kept() -> None:
    """Two blocks without the street between them are one loop that is neither of the two."""
    truth = noded(grid(4, 4))
    inner = next(line for line in truth if line.centroid.equals(shapely.Point(20, 30)))
    found = [line for line in truth if line is not inner]
    result = loops_kept(found, truth)
    assert (result.kept, result.total) == (7, 9)


def test_only_loops_inside_the_area_count() -> None:
    """A loop that reaches into the next tile cannot be whole in this one."""
    result = loops_kept(grid(4, 4), grid(4, 4), area=box(-1, -1, 45, 45))
    assert (result.kept, result.total) == (4, 4)


def test_a_loop_that_the_sidewalks_cover_is_not_expected() -> None:
    """Two sidewalks side by side leave no hole between them that an image could show."""
    truth = [*grid(2, 2), LineString([(0, 1.2), (20, 1.2)])]
    assert loops_kept([], truth).total == 2
    assert loops_kept([], truth, line_width_m=1.5).total == 1
    assert loops_kept([], truth, line_width_m=0.5, smallest_hole_m2=20).total == 1
