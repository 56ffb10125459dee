"""Cut a tile into the overlapping windows a model sees, and scale their values for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from centerlines.errors import TileError, UsageError

__all__ = [
    "ChipGrid",
    "ChipOrigin",
    "chips_with_data",
    "cut_chips",
    "fill_invalid",
    "foreground_probability",
    "normalise",
]


class ChipOrigin(NamedTuple):
    """The first pixel of a chip, in pixels of the raster; negative where the chip begins outside."""

    y: int
    """Row."""
    x: int
    """Column."""


@dataclass(frozen=True)
class ChipGrid:
    """Where the chips of a raster lie, numbered row by row.

    The grid begins half an overlap before the raster and ends at least as far behind it, so that a pixel at the
    raster's edge is as far from its chip's border as any other pixel: a model that is unreliable near its input's
    border is no less right there.
    """

    height: int
    """Rows of the raster."""
    width: int
    """Columns of the raster."""
    chip_size: int = 256
    """Rows and columns of a chip."""
    overlap: int = 32
    """Pixels that neighbouring chips share; at most half a chip, so that only neighbours meet."""

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise UsageError(f"raster of {self.height} x {self.width} pixels: needs at least one pixel")
        if self.chip_size < 1:
            raise UsageError(f"chip size {self.chip_size}: must be at least 1")
        if not 0 <= self.overlap <= self.chip_size // 2:
            raise UsageError(
                f"chip overlap {self.overlap}: must be from 0 to half the chip size, {self.chip_size // 2}"
            )

    @property
    def stride(self) -> int:
        """Pixels from one chip to the next."""
        return self.chip_size - self.overlap

    @property
    def margin(self) -> int:
        """Pixels the grid begins before the raster."""
        return self.overlap // 2

    @property
    def rows(self) -> int:
        """Chips from top to bottom."""
        return self._count(self.height)

    @property
    def columns(self) -> int:
        """Chips from left to right."""
        return self._count(self.width)

    def _count(self, length: int) -> int:
        uncovered = length + 2 * self.margin - self.chip_size
        return 1 + max(0, -(-uncovered // self.stride))

    def __len__(self) -> int:
        return self.rows * self.columns

    def origin(self, index: int) -> ChipOrigin:
        """Return where the chip begins.

        Raises:
            IndexError: there is no such chip.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"chip {index} is not one of {len(self)}")
        row, column = divmod(index, self.columns)
        return ChipOrigin(y=row * self.stride - self.margin, x=column * self.stride - self.margin)


def fill_invalid(pixels: NDArray[Any], valid: NDArray[np.bool_]) -> NDArray[Any]:
    """Give each pixel without data the value of the nearest one that has data, so that no edge appears between them.

    Nearest to within the few percent of OpenCV's 5 x 5 distance mask.

    Args:
        pixels: (channels, height, width), any dtype.
        valid: (height, width).

    Returns:
        The same array when all is valid, else a copy; zeros when nothing is.
    """
    if valid.all():
        return pixels
    if not valid.any():
        return np.zeros_like(pixels)
    _, labels = cv2.distanceTransformWithLabels(
        (~valid).view(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_5, labelType=cv2.DIST_LABEL_PIXEL
    )
    # OpenCV numbers the valid pixels row by row from 1.
    invalid = np.flatnonzero(~valid)
    nearest = np.flatnonzero(valid)[labels.reshape(-1)[invalid] - 1]
    filled = pixels.copy()
    for source, channel in zip(pixels, filled, strict=True):
        channel.reshape(-1)[invalid] = source.reshape(-1)[nearest]
    return filled


def chips_with_data(valid: NDArray[np.bool_], grid: ChipGrid) -> list[int]:
    """List the chips that hold at least one valid pixel; the others need not be predicted.

    Args:
        valid: (height, width) of the grid's raster.
        grid: the chips.
    """
    size = grid.chip_size
    chips = []
    for index in range(len(grid)):
        y, x = grid.origin(index)
        if valid[max(0, y) : y + size, max(0, x) : x + size].any():
            chips.append(index)
    return chips


def cut_chips(pixels: NDArray[Any], grid: ChipGrid, indices: Sequence[int]) -> NDArray[Any]:
    """Copy chips out of a raster.

    Beyond the raster's edge the picture is mirrored with its outermost pixel repeated: a path that reaches the edge
    goes on straight and at full width, no step in brightness appears, and it works for a raster of one pixel.

    Args:
        pixels: (channels, height, width), any dtype.
        grid: the chips of that raster.
        indices: which chips.

    Returns:
        The chips (n, channels, chip_size, chip_size), in the dtype of the raster.
    """
    size = grid.chip_size
    channels = pixels.shape[0]
    chips = np.empty((len(indices), channels, size, size), dtype=pixels.dtype)
    for chip, index in zip(chips, indices, strict=True):
        y, x = grid.origin(index)
        if y >= 0 and x >= 0 and y + size <= grid.height and x + size <= grid.width:
            chip[:] = pixels[:, y : y + size, x : x + size]
        else:
            rows, columns = _mirrored(y, size, grid.height), _mirrored(x, size, grid.width)
            chip[:] = pixels[:, rows[:, np.newaxis], columns]
    return chips


def _mirrored(start: int, size: int, length: int) -> NDArray[np.intp]:
    """Return the positions within 0 .. length - 1 that a window shows when the line is mirrored at its ends."""
    position = np.arange(start, start + size) % (2 * length)
    return np.where(position < length, position, 2 * length - 1 - position)


def normalise(
    chips: NDArray[Any], *, divisor: float, mean: Sequence[float], std: Sequence[float]
) -> NDArray[np.float32]:
    """Scale values to the model's input: (value / divisor - mean) / std, the same for every chip.

    Args:
        chips: (n, channels, height, width), any dtype.
        divisor: what brings the values to the 0-1 scale.
        mean: one value a channel, on the 0-1 scale.
        std: one value a channel, on the 0-1 scale.

    Returns:
        The input (n, channels, height, width).
    """
    per_channel = (len(mean), 1, 1)
    factor = (1 / (divisor * np.asarray(std, dtype=np.float64))).astype(np.float32).reshape(per_channel)
    offset = (-np.asarray(mean, dtype=np.float64) / std).astype(np.float32).reshape(per_channel)
    scaled = chips.astype(np.float32)
    scaled *= factor
    scaled += offset
    return scaled


def foreground_probability(logits: NDArray[np.floating]) -> NDArray[np.float32]:
    """Turn the logits of background and foreground (n, 2, height, width) into the foreground's probability.

    Returns:
        Softmax of channel 1 (n, height, width).

    Raises:
        TileError: a logit is not a number.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # an infinite margin is 0 or 1, inf - inf is found below
        margin: NDArray[np.float32] = np.subtract(logits[:, 1], logits[:, 0], dtype=np.float32)
    broken = np.isnan(margin).any(axis=(1, 2))
    if broken.any():
        raise TileError(
            f"the model answered NaN in {broken.sum()} of {len(logits)} chips;"
            " check the model, and mean and std in its configuration"
        )
    # Softmax of two is (1 + tanh(difference / 2)) / 2, which cannot overflow.
    margin *= np.float32(0.5)
    np.tanh(margin, out=margin)
    margin += np.float32(1)
    margin *= np.float32(0.5)
    return margin
