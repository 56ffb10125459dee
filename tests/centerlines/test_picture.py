"""Small pictures of tiles: where things are in them."""

from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from centerlines.picture import GAP, LONGER_SIDE, draw_picture, preview

SIZES = [(1, 1), (1, 5000), (5000, 1), (2, 3), (300, 300), (640, 640), (641, 640), (1000, 500), (700, 5000)]


def decode(picture: bytes) -> NDArray[np.uint8]:
    """The picture's pixels as (rows, columns, blue-green-red)."""
    pixels = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR)
    assert pixels is not None
    return np.asarray(pixels, dtype=np.uint8)


def parts(picture: bytes) -> list[NDArray[np.uint8]]:
    """Imagery, mask, and lines over imagery."""
    pixels = decode(picture)
    width = (pixels.shape[1] - 2 * GAP) // 3
    return [pixels[:, first : first + width] for first in (0, width + GAP, 2 * (width + GAP))]


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_a_preview_keeps_the_shape_of_the_tile(height: int, width: int, dtype: str) -> None:
    """A long thin tile must neither vanish nor be stretched; a small one is not enlarged."""
    pixels = (np.random.default_rng(0).random((3, height, width)) * 200).astype(dtype)
    small = preview(pixels, divisor=255)
    assert small.dtype == np.uint8
    rows, columns, channels = small.shape
    assert channels == 3
    assert max(rows, columns) == min(max(height, width), LONGER_SIDE)
    scale = max(rows, columns) / max(height, width)
    assert rows == pytest.approx(height * scale, abs=1)
    assert columns == pytest.approx(width * scale, abs=1)
    assert min(rows, columns) >= 1


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_a_picture_of_any_size_can_be_drawn(height: int, width: int) -> None:
    """A picture is never worth a failed tile."""
    small = preview(np.zeros((3, height, width), np.uint8), divisor=255)
    mask = np.ones((height, width), np.uint8)
    line = np.array([[0.0, 0.0], [width, height]])
    pixels = decode(draw_picture(small, mask, [line]))
    assert pixels.shape == (small.shape[0], 3 * small.shape[1] + 2 * GAP, 3)


def test_dark_imagery_is_stretched_alike_in_all_channels() -> None:
    """16-bit aerial photos use a small part of their range, and would be black; their colours must stay."""
    ramp = np.linspace(100, 300, 400 * 400).reshape(400, 400).astype(np.uint16)
    small = preview(np.stack([ramp, ramp // 2 + 50, np.full_like(ramp, 100)]), divisor=65535)
    assert small[..., 0].min() < 5
    assert small[..., 0].max() > 250
    assert abs(int(small[..., 1].max()) - 128) < 5
    assert (small[..., 2] < 5).all()


@pytest.mark.parametrize("gap", [np.nan, np.inf, -np.inf])
def test_pixels_without_a_number_are_dark_and_harm_no_others(gap: float) -> None:
    """Mosaics of floats have such pixels along their edges."""
    pixels = np.random.default_rng(0).random((3, 200, 200)).astype(np.float32)
    pixels[:, :20] = gap
    small = preview(pixels, divisor=1.0)
    assert (small[:19] == 0).all()
    assert 100 < small[30:].mean() < 155
    assert (preview(np.full((3, 9, 9), gap, np.float32), divisor=1.0) == 0).all()


def test_colours_are_those_of_the_channels() -> None:
    """NIR, green, blue are shown as red, green, blue, as people who read such photos expect."""
    pixels: NDArray[Any] = np.zeros((3, 90, 90), np.uint8)
    for channel in range(3):
        pixels[channel, 30 * channel : 30 * channel + 30] = 200
    photo = parts(draw_picture(preview(pixels, divisor=255), np.zeros((90, 90), np.uint8), []))[0]
    for channel in range(3):
        blue_green_red = photo[30 * channel + 15, 45]
        assert int(np.argmax(blue_green_red)) == 2 - channel


def test_the_mask_is_in_its_place() -> None:
    """White is sidewalk."""
    mask = np.zeros((1280, 1280), np.uint8)
    mask[320:640, 960:] = 1
    plane = parts(draw_picture(preview(np.zeros((3, 1280, 1280), np.uint8), divisor=255), mask, []))[1]
    assert plane[170:310, 490:630].min() > 240
    assert plane[:150].max() < 15
    assert plane[:, :470].max() < 15


@pytest.mark.parametrize("size", [320, 640, 1600])
def test_a_line_is_drawn_where_it_is(size: int) -> None:
    """Pixel centres are at halves in the lines' coordinates: half a pixel off shows when the picture is enlarged."""
    column = 0.25 * size + 0.5 * size / min(size, LONGER_SIDE)
    line = np.array([[column, 0.0], [column, size]])
    small = preview(np.zeros((3, size, size), np.uint8), divisor=255)
    overlay = parts(draw_picture(small, np.zeros((size, size), np.uint8), [line]))[2].astype(int)
    brightness = overlay[20:-20, :, 1:].mean(axis=(0, 2))
    assert int(brightness.argmax()) == min(size, LONGER_SIDE) // 4
    np.testing.assert_allclose(brightness[brightness.argmax() - 1], brightness[brightness.argmax() + 1], atol=12)


def test_without_lines_the_overlay_is_the_darker_imagery() -> None:
    """A tile without sidewalks has a picture too."""
    pixels = np.random.default_rng(3).integers(0, 255, (3, 64, 64), dtype=np.uint8)
    photo, _, overlay = parts(draw_picture(preview(pixels, divisor=255), np.zeros((64, 64), np.uint8), []))
    assert overlay.mean() == pytest.approx(0.6 * photo.mean(), abs=3)
