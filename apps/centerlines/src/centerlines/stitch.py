"""Join the predictions of overlapping chips into one raster."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from centerlines.chips import ChipGrid, ChipOrigin, chips_with_data

__all__ = ["Stitched", "blend_window", "stitch"]

_LEAST_WEIGHT = 1e-4

_Window = tuple[slice, slice]


@dataclass(frozen=True)
class Stitched:
    """The prediction for a whole raster."""

    probability: NDArray[np.float32]
    """Foreground probability (height, width); 0 where the raster has no data."""
    disagreement: float
    """Mean absolute difference, 0-1, of what two neighbouring chips say about the same valid pixel; 0 without overlap.
    A model that answers by content alone has 0, one that is misled by its input's border has more."""


def blend_window(*, chip_size: int, overlap: int) -> NDArray[np.float32]:
    """Return the weight of a chip's pixels along one axis (chip_size,), never 0.

    The weight is a logistic of the distance to the chip's border, with its middle in the middle of the overlap: there
    the weights of two neighbours add up to 1. It rises within a few pixels (overlap / 64 is the scale), because where
    four chips meet and three are wrong, the one that is right needs a weight near 1.
    """
    if overlap == 0:
        return np.ones(chip_size, dtype=np.float32)
    position = np.arange(chip_size) + 0.5
    distance = np.minimum(position, chip_size - position)
    weight = 1 / (1 + np.exp((overlap / 2 - distance) * (64 / overlap)))
    window: NDArray[np.float32] = np.maximum(weight, _LEAST_WEIGHT).astype(np.float32)
    return window


def stitch(probabilities: Mapping[int, NDArray[np.floating]], grid: ChipGrid, valid: NDArray[np.bool_]) -> Stitched:
    """Blend the probabilities of chips where they overlap.

    Args:
        probabilities: the foreground probability (chip_size, chip_size), float16 or float32, of each chip of the grid
            that holds a valid pixel; others may be left out.
        grid: the chips of the raster.
        valid: which pixels of the raster hold data (height, width).

    Raises:
        ValueError: a chip is missing or has another shape, or the mask has.
    """
    if valid.shape != (grid.height, grid.width):
        raise ValueError(f"mask is {valid.shape}, raster is {(grid.height, grid.width)}")
    needed = chips_with_data(valid, grid)
    missing = [index for index in needed if index not in probabilities]
    if missing:
        raise ValueError(f"{len(missing)} of {len(needed)} chips are missing, the first is chip {missing[0]}")

    row_weights = _weights(grid, count=grid.rows)
    column_weights = _weights(grid, count=grid.columns)
    # A chip that is left out takes its weight with it, but covers no valid pixel.
    blended = np.zeros((grid.height, grid.width), dtype=np.float32)
    for index in needed:
        chip = probabilities[index]
        if chip.shape != (grid.chip_size, grid.chip_size):
            raise ValueError(f"chip {index} is {chip.shape}, not {(grid.chip_size, grid.chip_size)}")
        row, column = divmod(index, grid.columns)
        inside, (rows, columns) = _clip(grid, grid.origin(index), height=grid.chip_size, width=grid.chip_size)
        weighted = chip[rows, columns].astype(np.float32)
        weighted *= row_weights[row, rows, np.newaxis]
        weighted *= column_weights[column, columns]
        blended[inside] += weighted
    np.copyto(blended, 0, where=~valid)
    return Stitched(probability=blended, disagreement=_disagreement(probabilities, needed, grid, valid))


def _weights(grid: ChipGrid, *, count: int) -> NDArray[np.float32]:
    """Return the weights of chips along one axis (count, chip_size), such that they add up to 1 at every pixel.

    They are divided by their sum once here, instead of a plane of sums for the raster.
    """
    window = blend_window(chip_size=grid.chip_size, overlap=grid.overlap).astype(np.float64)
    total = np.zeros((count - 1) * grid.stride + grid.chip_size)
    starts = range(0, count * grid.stride, grid.stride)
    for start in starts:
        total[start : start + grid.chip_size] += window
    return np.stack([window / total[start : start + grid.chip_size] for start in starts]).astype(np.float32)


def _clip(grid: ChipGrid, origin: ChipOrigin, *, height: int, width: int) -> tuple[_Window, _Window]:
    """Return the part of a window that lies in the raster, in pixels of the raster and in pixels of the window."""
    y, x = origin
    top, left = max(0, y), max(0, x)
    bottom, right = min(grid.height, y + height), min(grid.width, x + width)
    return (slice(top, bottom), slice(left, right)), (slice(top - y, bottom - y), slice(left - x, right - x))


def _disagreement(
    probabilities: Mapping[int, NDArray[np.floating]], needed: list[int], grid: ChipGrid, valid: NDArray[np.bool_]
) -> float:
    """Compare each chip with its neighbours to the right and below on the pixels they share."""
    size, stride = grid.chip_size, grid.stride
    present = set(needed)
    total, count = 0.0, 0
    for index in needed:
        below = (index + grid.columns, slice(stride, size), slice(0, size))
        right = (index + 1, slice(0, size), slice(stride, size))
        in_last_column = (index + 1) % grid.columns == 0
        for neighbour, rows, columns in (below,) if in_last_column else (below, right):
            if neighbour not in present:
                continue
            height, width = rows.stop - rows.start, columns.stop - columns.start
            inside, shared = _clip(grid, grid.origin(neighbour), height=height, width=width)
            own = probabilities[index][rows, columns][shared]
            difference = np.abs(np.subtract(own, probabilities[neighbour][shared], dtype=np.float32))[valid[inside]]
            total += float(difference.sum(dtype=np.float64))
            count += difference.size
    return total / count if count else 0.0
