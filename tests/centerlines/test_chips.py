"""Chips out of a raster, and their values."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from centerlines.chips import (
    ChipGrid,
    chips_with_data,
    cut_chips,
    fill_invalid,
    foreground_probability,
    normalise,
)
from centerlines.errors import TileError, UsageError


def test_a_new_jersey_tile_has_529_chips() -> None:
    """The published run cuts 23 x 23 chips; more would cost time at the same tile."""
    grid = ChipGrid(5000, 5000)
    assert (grid.rows, grid.columns, len(grid), grid.stride) == (23, 23, 529, 224)
    assert grid.origin(0) == (-16, -16)
    assert grid.origin(24) == (208, 208)


@pytest.mark.parametrize(("chip_size", "overlap"), [(256, 32), (256, 0), (256, 128), (9, 3), (8, 4), (2, 1), (1, 0)])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 223, 224, 225, 255, 256, 257, 481])
def test_every_pixel_is_far_from_the_border_of_a_chip(length: int, chip_size: int, overlap: int) -> None:
    """A pixel in no chip is never predicted, one near the border of its only chip is predicted badly."""
    grid = ChipGrid(length, 3, chip_size=chip_size, overlap=overlap)
    starts = [grid.origin(row * grid.columns).y for row in range(grid.rows)]
    pixel = np.arange(length)[:, np.newaxis]
    before = pixel - np.array(starts)
    distance = np.minimum(before, chip_size - 1 - before).max(axis=1)
    assert distance.min() >= overlap // 2
    if grid.rows > 1:  # and no chip is there for nothing
        assert starts[-2] + chip_size < length + overlap // 2


@pytest.mark.parametrize(("size", "overlap"), [(256, -1), (256, 129), (0, 0), (-5, 0)])
def test_a_grid_that_makes_no_sense_is_refused(size: int, overlap: int) -> None:
    """--chip-overlap 300 must end as one line, not as an endless grid."""
    with pytest.raises(UsageError, match=r"chip (size|overlap) -?\d+: must be"):
        ChipGrid(10, 10, chip_size=size, overlap=overlap)


def test_there_is_no_raster_without_pixels_and_no_chip_outside_the_grid() -> None:
    """Both would count as a chip that never arrives."""
    with pytest.raises(UsageError, match="0 x 5"):
        ChipGrid(0, 5)
    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"chip {index} is not one of 1"):
            ChipGrid(5, 5).origin(index)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5), (3, 2), (40, 61), (128, 300)])
@pytest.mark.parametrize(("chip_size", "overlap"), [(64, 16), (64, 0), (31, 15), (1, 0)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_chips_equal_windows_of_the_mirrored_raster(
    height: int, width: int, chip_size: int, overlap: int, dtype: type
) -> None:
    """The padding may be far larger than the raster; numpy's own symmetric padding is the answer."""
    pixels: NDArray[Any] = np.random.default_rng(0).integers(0, 200, (2, height, width)).astype(dtype)
    grid = ChipGrid(height, width, chip_size=chip_size, overlap=overlap)
    far = 2 * chip_size
    padded = np.pad(pixels, ((0, 0), (far, far), (far, far)), mode="symmetric")
    indices = list(range(len(grid)))[::-1][:50]
    chips = cut_chips(pixels, grid, indices)
    assert chips.dtype == dtype
    for chip, index in zip(chips, indices, strict=True):
        y, x = grid.origin(index)
        expected = padded[:, y + far : y + far + chip_size, x + far : x + far + chip_size]
        np.testing.assert_array_equal(chip, expected)


def test_no_chips_are_an_empty_batch() -> None:
    """A tile without data has nothing to cut."""
    assert cut_chips(np.zeros((3, 9, 9), dtype=np.uint8), ChipGrid(9, 9), []).shape == (0, 3, 256, 256)


def test_only_chips_that_hold_data_are_listed() -> None:
    """Empty chips would cost inference, a chip left out by mistake would leave a hole."""
    grid = ChipGrid(300, 300, chip_size=64, overlap=16)
    rng = np.random.default_rng(3)
    for _ in range(20):
        valid = np.zeros((300, 300), dtype=np.bool_)
        y, x = rng.integers(0, 300, 2)
        valid[y, x] = True
        origins = {index: grid.origin(index) for index in range(len(grid))}
        expected = [i for i, (top, left) in origins.items() if top <= y < top + 64 and left <= x < left + 64]
        assert chips_with_data(valid, grid) == expected
    assert chips_with_data(np.zeros((300, 300), dtype=np.bool_), grid) == []
    assert len(chips_with_data(np.ones((300, 300), dtype=np.bool_), grid)) == len(grid)


@pytest.mark.parametrize(("height", "width"), [(1, 9), (9, 1), (40, 50)])
@pytest.mark.parametrize("share", [0.05, 0.6])
def test_pixels_without_data_take_the_value_of_a_nearest_one(height: int, width: int, share: float) -> None:
    """Black nodata beside a photo is an edge, and models draw lines along edges."""
    rng = np.random.default_rng(4)
    valid = rng.random((height, width)) < share
    valid[0, 0] = True
    # Each pixel's value is its own position, so that the filled value tells where it came from.
    positions = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij")).astype(np.float32)
    filled = fill_invalid(np.where(valid, positions, np.nan), valid)
    np.testing.assert_array_equal(filled[:, valid], positions[:, valid])
    sources = filled.astype(int)
    assert valid[sources[0], sources[1]].all()
    taken = np.hypot(*(filled - positions))
    points = np.argwhere(valid)
    nearest = np.hypot(*(positions[:, :, :, np.newaxis] - points.T[:, np.newaxis, np.newaxis])).min(axis=-1)
    assert (taken <= nearest * 1.05 + 1e-6).all()


def test_one_pixel_with_data_fills_a_large_raster() -> None:
    """OpenCV's distance must reach across a tile that is nearly all nodata."""
    valid = np.zeros((2500, 3000), dtype=np.bool_)
    valid[2499, 7] = True
    pixels = np.zeros((2, 2500, 3000), dtype=np.uint8)
    pixels[:, 2499, 7] = (5, 9)
    filled = fill_invalid(pixels, valid)
    assert (filled[0] == 5).all()
    assert (filled[1] == 9).all()
    assert pixels.sum() == 14  # the input is left as it was


def test_a_full_or_an_empty_raster_needs_no_filling() -> None:
    """Most tiles have no nodata and must cost nothing; an all-NaN tile must not stay NaN."""
    pixels = np.ones((3, 4, 5), dtype=np.uint16)
    assert fill_invalid(pixels, np.ones((4, 5), dtype=np.bool_)) is pixels
    empty = fill_invalid(np.full((3, 4, 5), np.nan, dtype=np.float32), np.zeros((4, 5), dtype=np.bool_))
    assert not empty.any()


@pytest.mark.parametrize(("dtype", "divisor"), [(np.uint8, 255.0), (np.uint16, 4095.0), (np.float32, 1.0)])
def test_values_are_scaled_by_divisor_mean_and_std(dtype: type, divisor: float) -> None:
    """A model fed with other values than it was trained with finds nothing, without an error."""
    values = np.random.default_rng(5).random((4, 3, 20, 30)) * divisor
    chips: NDArray[Any] = values.astype(dtype)
    mean, std = [0.4, 0.5, 0.3], [0.2, 0.1, 0.25]
    found = normalise(chips, divisor=divisor, mean=mean, std=std)
    assert found.dtype == np.float32
    expected = (chips.astype(np.float64) / divisor - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    np.testing.assert_allclose(found, expected, atol=5e-6)
    # The same pixels give the same bits, alone or beside a chip that is brighter.
    np.testing.assert_array_equal(normalise(chips[1:2], divisor=divisor, mean=mean, std=std)[0], found[1])


def test_probability_is_the_softmax_of_the_foreground() -> None:
    """Large logits are common and must give 0 and 1, not an overflow."""
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 8, (3, 2, 7, 9)).astype(np.float32)
    logits[0, :, 0, :4] = [[1e4, -1e4, -3e38, np.inf], [-1e4, 1e4, 3e38, 0]]
    found = foreground_probability(logits)
    assert found.shape == (3, 7, 9)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[0, 0, :4], [0, 1, 1, 0])
    background, foreground = (math.exp(value) for value in logits[1, :, 3, 4].astype(float))
    assert found[1, 3, 4] == pytest.approx(foreground / (background + foreground), abs=1e-6)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(found[1:], 1 / (1 + np.exp(logits[1:, 0] - logits[1:, 1])), atol=1e-6)
    assert foreground_probability(logits[1:].astype(np.float16)).dtype == np.float32


@pytest.mark.parametrize("answer", [(np.nan, 0.0), (np.inf, np.inf)])
def test_a_model_that_answers_nan_is_named(answer: tuple[float, float]) -> None:
    """NaN is not above any threshold: the tile would end as done, without a single line."""
    logits = np.zeros((3, 2, 4, 4), dtype=np.float32)
    logits[2, :, 1, 1] = answer
    with pytest.raises(TileError, match="model answered NaN in 1 of 3 chips"):
        foreground_probability(logits)
