"""Thinning of a mask to lines one pixel wide."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["thin"]

# Row and column of the eight neighbours, clockwise from the one above; their bits make a neighbourhood's code.
_NEIGHBOURS = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))


def thin(mask: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """The mask's skeleton: as many pieces and holes as the mask has.

    Algorithm A1 of Guo and Hall 1989, Parallel thinning with two-subiteration algorithms. The better known one of Zhang
    and Suen 1984 loses whole lines where they are diagonal and an even number of pixels wide.

    Args:
        mask: (height, width), 0 or 1.
    """
    flat = np.pad(mask, 1).ravel()
    stride = mask.shape[1] + 2
    offsets = [row * stride + column for row, column in _NEIGHBOURS]
    left = np.flatnonzero(flat)
    unchanged = 0
    while unchanged < 2:
        for removable in _REMOVABLE:
            codes = np.zeros(len(left), dtype=np.uint8)
            for bit, offset in enumerate(offsets):
                codes |= flat[left + offset] << np.uint8(bit)
            removed = removable[codes]
            unchanged = 0 if removed.any() else unchanged + 1
            flat[left[removed]] = 0
            left = left[~removed]
    return flat.reshape(-1, stride)[1:-1, 1:-1].astype(bool)


def _removable() -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each subiteration, whether a pixel goes that has the neighbourhood with a code, (256,)."""
    north, north_east, east, south_east, south, south_west, west, north_west = (
        (np.arange(256) >> bit & 1).astype(bool) for bit in range(8)
    )
    crossings = (
        (~north & (north_east | east)).astype(int)
        + (~east & (south_east | south))
        + (~south & (south_west | west))
        + (~west & (north_west | north))
    )
    first = (north_west | north).astype(int) + (north_east | east) + (south_east | south) + (south_west | west)
    second = (north | north_east).astype(int) + (east | south_east) + (south | south_west) + (west | north_west)
    neighbours = np.minimum(first, second)
    goes = (crossings == 1) & (neighbours >= 2) & (neighbours <= 3)
    return goes & ~((north | north_east | ~south_east) & east), goes & ~((south | south_west | ~north_west) & west)


_REMOVABLE = _removable()
