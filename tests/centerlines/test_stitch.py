"""Predictions of chips to one raster."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from centerlines.chips import ChipGrid, chips_with_data, cut_chips
from centerlines.stitch import blend_window, stitch

Plane = NDArray[np.float32]
SIZES = [(1, 1), (1, 700), (223, 224), (225, 241), (256, 257), (500, 333)]


def _predict(truth: Plane, grid: ChipGrid, model: Callable[[Plane], Plane] = lambda chip: chip) -> dict[int, Plane]:
    chips = cut_chips(truth[np.newaxis], grid, range(len(grid)))[:, 0]
    return {index: model(chip) for index, chip in enumerate(chips)}


def _all(grid: ChipGrid) -> NDArray[np.bool_]:
    return np.ones((grid.height, grid.width), dtype=np.bool_)


def _by_definition(chips: dict[int, Plane], grid: ChipGrid) -> NDArray[np.float64]:
    """Blend with planes of weights, on a canvas around the raster."""
    size, margin = grid.chip_size, grid.margin
    shape = ((grid.rows - 1) * grid.stride + size, (grid.columns - 1) * grid.stride + size)
    total, weights = np.zeros(shape), np.zeros(shape)
    window = np.outer(*[blend_window(chip_size=size, overlap=grid.overlap).astype(np.float64)] * 2)
    for index, chip in chips.items():
        y, x = grid.origin(index)
        place = slice(y + margin, y + margin + size), slice(x + margin, x + margin + size)
        total[place] += chip * window
        weights[place] += window
    return (total / weights)[margin : margin + grid.height, margin : margin + grid.width]


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(("chip_size", "overlap"), [(256, 32), (256, 0), (64, 32), (64, 1), (33, 15), (1, 0)])
def test_a_constant_model_gives_a_constant_raster(height: int, width: int, chip_size: int, overlap: int) -> None:
    """A seam or a faded border would draw or lose sidewalks there, whatever the size."""
    if chip_size == 1 and height * width > 1000:
        height, width = min(height, 30), min(width, 30)
    grid = ChipGrid(height, width, chip_size=chip_size, overlap=overlap)
    chip = np.full((chip_size, chip_size), 0.7, dtype=np.float32)
    result = stitch(dict.fromkeys(range(len(grid)), chip), grid, _all(grid))
    assert result.probability.shape == (height, width)
    assert result.probability.dtype == np.float32
    np.testing.assert_allclose(result.probability, 0.7, atol=1e-6)
    assert result.disagreement == 0


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("overlap", [0, 7, 32])
def test_chips_of_a_picture_give_the_picture_back(height: int, width: int, overlap: int) -> None:
    """A shift of one pixel between cutting and stitching would move every line."""
    truth = np.random.default_rng(1).random((height, width), dtype=np.float32)
    grid = ChipGrid(height, width, chip_size=64, overlap=overlap)
    result = stitch(_predict(truth, grid), grid, _all(grid))
    np.testing.assert_allclose(result.probability, truth, atol=1e-6)
    assert result.disagreement == 0


@pytest.mark.parametrize("overlap", [0, 1, 15, 32])
def test_blending_is_the_weighted_mean(overlap: int) -> None:
    """The short way with weights that add up to one must equal the definition."""
    rng = np.random.default_rng(2)
    grid = ChipGrid(150, 170, chip_size=64, overlap=overlap)
    chips = {index: rng.random((64, 64), dtype=np.float32) for index in range(len(grid))}
    result = stitch(chips, grid, _all(grid))
    np.testing.assert_allclose(result.probability, _by_definition(chips, grid), atol=1e-6)


@pytest.mark.parametrize("wrong", [0.01, 0.99])
@pytest.mark.parametrize(("height", "width"), [(5, 5), (300, 700), (1, 448)])
def test_a_model_that_is_wrong_within_15_pixels_of_its_border_does_not_matter(
    wrong: float, height: int, width: int
) -> None:
    """Real networks are wrong there; where four chips meet, three wrong ones must not outvote the right one."""

    def spoilt(chip: Plane) -> Plane:
        answer = np.full_like(chip, wrong)
        answer[15:-15, 15:-15] = chip[15:-15, 15:-15]
        return answer

    truth = np.full((height, width), 1 - wrong, dtype=np.float32)
    grid = ChipGrid(height, width)
    result = stitch(_predict(truth, grid, spoilt), grid, _all(grid))
    assert np.abs(result.probability - truth).max() < 0.2
    assert (result.disagreement > 0) == (len(grid) > 1)


def test_disagreement_is_the_mean_difference_of_neighbours() -> None:
    """It tells a tile on which the model contradicts itself from one that is only difficult."""
    grid = ChipGrid(400, 230)
    assert len(grid) == 4
    values = {0: 0.5, 1: 0.5, 2: 0.8, 3: 0.8}
    chips = {index: np.full((256, 256), value, dtype=np.float16) for index, value in values.items()}
    valid = _all(grid)
    valid[:, 200:] = False
    # No valid pixel lies in the chips to the right; the two to the left differ by 0.3 on the rows they share.
    result = stitch(chips, grid, valid)
    assert result.disagreement == pytest.approx(0.3, abs=1e-3)


def test_pixels_without_data_have_no_probability_and_their_chips_may_be_left_out() -> None:
    """Nothing may be drawn where the photo has nothing, and empty chips are never sent."""
    grid = ChipGrid(500, 900)
    valid = _all(grid)
    valid[:, 300:] = False
    valid[100, 100] = False
    needed = chips_with_data(valid, grid)
    assert len(needed) < len(grid)
    chips = {index: np.full((256, 256), 0.9, dtype=np.float32) for index in needed}
    probability = stitch(chips, grid, valid).probability
    np.testing.assert_allclose(probability[valid], 0.9, atol=1e-6)
    assert not probability[~valid].any()


def test_a_missing_chip_is_named() -> None:
    """A hole in the prediction would be a gap in the network that nobody can explain."""
    grid = ChipGrid(500, 500)
    chips = dict.fromkeys(range(len(grid)), np.zeros((256, 256), dtype=np.float32))
    del chips[4]
    with pytest.raises(ValueError, match="1 of 9 chips are missing, the first is chip 4"):
        stitch(chips, grid, _all(grid))


def test_chips_or_masks_of_another_size_are_refused() -> None:
    """They would be added in the wrong place, or only half."""
    grid = ChipGrid(10, 10)
    with pytest.raises(ValueError, match="chip 0 is"):
        stitch({0: np.zeros((128, 128), dtype=np.float32)}, grid, _all(grid))
    with pytest.raises(ValueError, match="mask is"):
        stitch({0: np.zeros((256, 256), dtype=np.float32)}, grid, np.ones((10, 11), dtype=np.bool_))


@pytest.mark.parametrize(("chip_size", "overlap"), [(256, 32), (256, 128), (64, 31), (33, 16), (8, 1)])
def test_the_weights_of_neighbours_add_up_to_one(chip_size: int, overlap: int) -> None:
    """Only then is the middle of a chip itself and the seam an even change from one chip to the next."""
    window = blend_window(chip_size=chip_size, overlap=overlap)
    assert window.min() >= 1e-4
    np.testing.assert_array_equal(window, window[::-1])
    if overlap < chip_size // 2:
        np.testing.assert_allclose(window[:overlap] + window[-overlap:], 1, atol=2e-4)
    assert (blend_window(chip_size=chip_size, overlap=0) == 1).all()
