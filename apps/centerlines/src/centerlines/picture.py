"""Small pictures of a tile, for people who would rather look than read."""

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

__all__ = ["draw_picture", "preview"]

LONGER_SIDE = 640
LINE_COLOUR = (0, 255, 255)  # blue, green, red: yellow is in neither vegetation nor asphalt
GAP = 8


def preview(pixels: NDArray[Any], *, divisor: float) -> NDArray[np.uint8]:
    """Shrink a tile's imagery (3, height, width) to a picture (rows, columns, 3), at most LONGER_SIDE long.

    Contrast is stretched between the 1st and 99th percentile, because aerial photos are often dark; alike in all
    channels, or grass would lose the red that people know it by in a picture with near infrared.
    """
    _, height, width = pixels.shape
    scale = min(1.0, LONGER_SIDE / max(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    channels = []
    for channel in pixels:
        values = np.nan_to_num(channel.astype(np.float32) / np.float32(divisor), posinf=0, neginf=0)
        channels.append(cv2.resize(values, size, interpolation=cv2.INTER_AREA).reshape(size[::-1]))
    picture = np.stack(channels, axis=-1)
    low, high = np.percentile(picture, (1, 99))
    stretched: NDArray[np.float32] = np.clip((picture - low) / max(float(high - low), 1e-6), 0, 1) * 255
    return stretched.astype(np.uint8)


def draw_picture(imagery: NDArray[np.uint8], mask: NDArray[np.uint8], lines: Sequence[NDArray[np.float64]]) -> bytes:
    """Draw imagery, mask, and lines over the imagery side by side.

    Args:
        imagery: what `preview` made of the tile (rows, columns, 3).
        mask: 0 or 1 (height, width).
        lines: vertices (n, 2) as column, row in pixels of the mask.

    Returns:
        A JPEG.
    """
    rows, columns, _ = imagery.shape
    height, width = mask.shape
    photo = np.ascontiguousarray(imagery[:, :, ::-1])  # OpenCV writes blue, green, red
    plane = cv2.resize(mask * np.uint8(255), (columns, rows), interpolation=cv2.INTER_AREA)
    overlay = (photo * 0.6).astype(np.uint8)
    # Pixel centres are at 0.5 in the lines' coordinates and at 0 in OpenCV's, which takes sixteenths of a pixel.
    scale = np.array([columns / width, rows / height])
    paths = [np.round((line * scale - 0.5) * 16).astype(np.int32) for line in lines]
    cv2.polylines(overlay, paths, isClosed=False, color=LINE_COLOUR, thickness=2, lineType=cv2.LINE_AA, shift=4)
    gap = np.full((rows, GAP, 3), 255, dtype=np.uint8)
    picture = np.hstack([photo, gap, cv2.cvtColor(plane, cv2.COLOR_GRAY2BGR), gap, overlay])
    _, encoded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 80])
    return bytes(encoded)
