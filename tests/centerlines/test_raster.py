"""Bands, data masks and georeference out of GeoTIFF files."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from affine import Affine
from numpy.typing import NDArray
from rasterio.enums import ColorInterp

from centerlines.errors import CenterlinesError, TileError, TileReadError, UsageError
from centerlines.raster import parse_bands, read_tile

RGB = (ColorInterp.red, ColorInterp.green, ColorInterp.blue)
RGB_UNDEFINED = (*RGB, ColorInterp.undefined)
PLACE = Affine(1, 0, 500_000, 0, -1, 500_000)


def _picture(count: int = 4, height: int = 40, width: int = 50, dtype: str = "uint8") -> NDArray[Any]:
    pixels: NDArray[Any] = np.random.default_rng(0).integers(1, 200, (count, height, width)).astype(dtype)
    return pixels / 255 if np.issubdtype(pixels.dtype, np.floating) else pixels


def _write(
    path: Path,
    pixels: NDArray[Any],
    *,
    colours: tuple[ColorInterp, ...] | None = RGB_UNDEFINED,
    descriptions: tuple[str, ...] = (),
    mask: NDArray[Any] | None = None,
    **profile: Any,
) -> Path:
    count, height, width = pixels.shape
    settings = {"crs": "EPSG:3424", "transform": PLACE, "photometric": "RGB" if count > 2 else "MINISBLACK", **profile}
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True),
        rasterio.open(
            path, "w", driver="GTiff", count=count, height=height, width=width, dtype=pixels.dtype, **settings
        ) as dataset,
    ):
        if colours:
            dataset.colorinterp = colours[:count]
        for number, description in enumerate(descriptions, start=1):
            dataset.set_band_description(number, description)
        dataset.write(pixels)
        if mask is not None:
            dataset.write_mask(mask)
    return path


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tiled": True, "blockxsize": 16, "blockysize": 32, "compress": "deflate", "interleave": "band"},
        {"compress": "lzw", "predictor": 2},
        {"compress": "zstd", "blockysize": 7},
    ],
)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_pseudo_colour_is_nir_green_blue(tmp_path: Path, layout: dict[str, Any], as_bytes: bool) -> None:
    """A model trained on NIR-GB finds nothing in another order; striped or tiled, from disk or from storage."""
    pixels = _picture()
    path = _write(tmp_path / "a.tif", pixels, **layout)
    tile = read_tile(path.read_bytes() if as_bytes else path)
    np.testing.assert_array_equal(tile.pixels, pixels[[3, 1, 2]])
    assert tile.pixels.dtype == np.uint8
    assert tile.valid.all()
    assert tile.transform == PLACE
    assert tile.crs == rasterio.crs.CRS.from_epsg(3424)
    assert tile.divisor == 255
    assert tile.name == ("in memory" if as_bytes else "a.tif")


def test_without_pseudo_colour_it_is_red_green_blue(tmp_path: Path) -> None:
    """A photo without NIR serves a model for ordinary colours."""
    pixels = _picture(3)
    tile = read_tile(str(_write(tmp_path / "a.tif", pixels)), use_pseudo_color_nir=False)
    np.testing.assert_array_equal(tile.pixels, pixels)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 300), (257, 3)])
def test_any_size_is_read(tmp_path: Path, height: int, width: int) -> None:
    """The last tile of a flight may be one line."""
    pixels = _picture(4, height, width)
    tile = read_tile(_write(tmp_path / "a.tif", pixels))
    np.testing.assert_array_equal(tile.pixels, pixels[[3, 1, 2]])
    assert tile.valid.shape == (height, width)


@pytest.mark.parametrize(
    ("count", "colours", "descriptions", "bands", "expected"),
    [
        (4, (*RGB, ColorInterp.nir), (), {}, [4, 2, 3]),
        (4, (*RGB, ColorInterp.alpha), (), {"NIR": 4}, [4, 2, 3]),
        (4, None, (), {"R": 1, "G": 2, "B": 3}, [4, 2, 3]),
        (4, RGB_UNDEFINED, ("Blue", "GREEN", "red", "Near-Infrared"), {}, [4, 2, 1]),
        (4, RGB_UNDEFINED, ("nir", "red", "green", "blue"), {}, [1, 3, 4]),
        (5, (*RGB_UNDEFINED, ColorInterp.undefined), ("", "", "", "", "near infrared"), {}, [5, 2, 3]),
        (3, RGB, (), {"NIR": 1, "G": 2, "B": 3}, [1, 2, 3]),
        (4, RGB_UNDEFINED, ("red", "green", "blue", "nir"), {"NIR": 1, "G": 1, "B": 4}, [1, 1, 4]),
    ],
)
def test_bands_come_from_the_option_then_descriptions_then_colours(
    tmp_path: Path,
    count: int,
    colours: tuple[ColorInterp, ...] | None,
    descriptions: tuple[str, ...],
    bands: dict[Any, int],
    expected: list[int],
) -> None:
    """A wrong guess is silent: the model simply sees other colours."""
    pixels = _picture(count)
    path = _write(
        tmp_path / "a.tif",
        pixels,
        colours=colours,
        descriptions=descriptions,
        photometric="RGB" if colours else "MINISBLACK",
    )
    tile = read_tile(path, bands=bands)
    np.testing.assert_array_equal(tile.pixels, pixels[np.array(expected) - 1])
    assert tile.valid.all()  # a band that is used as NIR is no alpha band


@pytest.mark.parametrize(
    ("count", "colours", "descriptions", "reason"),
    [
        (3, RGB, (), r"NIR-GB needs a NIR band, the file has 3 bands \(red, green, blue\)"),
        (4, (*RGB, ColorInterp.alpha), (), r"needs a NIR band, the file has 4 bands \(red, green, blue, alpha\)"),
        # Colour infrared: the third band is coloured blue and holds green.
        (3, RGB, ("nir", "red", "green"), r"needs a blue band, the file has 3 bands \(nir, red, green\)"),
        (1, None, (), r"needs a NIR band, the file has 1 band \(gray\)"),
        (5, (*RGB_UNDEFINED, ColorInterp.undefined), (), r"needs a NIR band, the file has 5 bands"),
    ],
)
def test_a_missing_band_says_what_the_file_has_and_how_to_name_it(
    tmp_path: Path, count: int, colours: tuple[ColorInterp, ...] | None, descriptions: tuple[str, ...], reason: str
) -> None:
    """The reason in progress.csv is all a person has to repair a thousand tiles with."""
    path = _write(tmp_path / "x.tif", _picture(count), colours=colours, descriptions=descriptions)
    # With a band number that the file does not have, the next message would be about that.
    example = "R=1,G=2,B=3,NIR=4" if count > 3 else "NIR=1,G=2,B=3 if one of them is near infrared"
    with pytest.raises(TileError, match=rf"^tile x\.tif: .*{reason}.*; name the bands with --bands {example}$"):
        read_tile(path)


def test_an_option_that_names_a_band_that_is_not_there_says_so(tmp_path: Path) -> None:
    """The option is for all tiles, and one of them may have a band less."""
    path = _write(tmp_path / "x.tif", _picture(3))
    with pytest.raises(TileError, match=r"tile x\.tif: NIR=4 needs band 4, file has 3"):
        read_tile(path, bands=parse_bands("R=1,G=2,B=3,NIR=4"))
    assert read_tile(path, bands={"NIR": 4}, use_pseudo_color_nir=False).pixels.shape == (3, 40, 50)


def test_band_options_are_parsed_with_any_case_and_spaces() -> None:
    """People type what they read in a table."""
    assert parse_bands("R=1,G=2,B=3,NIR=4") == {"R": 1, "G": 2, "B": 3, "NIR": 4}
    assert parse_bands(" nir = 12 , g=1") == {"NIR": 12, "G": 1}


@pytest.mark.parametrize(
    "text", ["", "R", "R=", "R=0", "R=-1", "R=x", "X=1", "R=1,R=2", "R=1,,G=2", "R=1;G=2", "R=1.0"]
)
def test_a_band_option_that_makes_no_sense_is_refused(text: str) -> None:
    """A typing mistake ends at once with exit code 2, not as a thousand failed tiles."""
    with pytest.raises(UsageError, match=f"--bands {re.escape(repr(text))}"):
        parse_bands(text)


def test_nodata_in_single_bands_is_a_colour(tmp_path: Path) -> None:
    """With nodata 255 a white roof reaches 255 in a band; holes in roofs and pavement would break lines."""
    pixels = _picture(3)
    pixels[0, 5, 5] = 255
    pixels[1:, 6, 6] = 255
    pixels[:, 7, 7] = 255
    tile = read_tile(_write(tmp_path / "a.tif", pixels, nodata=255), bands={"NIR": 1, "G": 2, "B": 3})
    assert np.argwhere(~tile.valid).tolist() == [[7, 7]]


@pytest.mark.parametrize(
    ("dtype", "nodata"), [("uint8", 0), ("uint16", 65535), ("float32", -3.4028234663852886e38), ("float32", np.nan)]
)
def test_nodata_is_found_in_every_data_type(tmp_path: Path, dtype: str, nodata: float) -> None:
    """A float nodata that is compared with other digits is never found, and gets scaled into the picture."""
    pixels = _picture(dtype=dtype)
    pixels[:, :, :10] = nodata
    valid = read_tile(_write(tmp_path / "a.tif", pixels, nodata=nodata)).valid
    assert not valid[:, :10].any()
    assert valid[:, 10:].all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_band_that_is_not_finite_spoils_the_pixel(tmp_path: Path, bad: float) -> None:
    """NaN in one channel makes the whole chip NaN inside a network."""
    pixels = _picture(dtype="float32")
    pixels[3, 2, 3] = bad
    pixels[0, 4, 4] = bad  # red is not used
    tile = read_tile(_write(tmp_path / "a.tif", pixels))
    assert np.argwhere(~tile.valid).tolist() == [[2, 3]]


def test_alpha_and_internal_masks_are_respected(tmp_path: Path) -> None:
    """Mosaics mark what lies outside the flight this way and fill it with anything."""
    mask = np.full((40, 50), 255, dtype=np.uint8)
    mask[10:20] = 0
    tile = read_tile(_write(tmp_path / "mask.tif", _picture(), mask=mask))
    np.testing.assert_array_equal(tile.valid, mask > 0)
    pixels = np.concatenate([_picture(), mask[np.newaxis]])
    colours = (*RGB_UNDEFINED, ColorInterp.alpha)
    alpha = _write(tmp_path / "alpha.tif", pixels, colours=colours, nodata=0)
    np.testing.assert_array_equal(read_tile(alpha, bands={"NIR": 4}).valid, mask > 0)


@pytest.mark.parametrize(
    ("dtype", "profile", "divisor"),
    [
        ("uint8", {}, 255),
        ("uint16", {}, 65535),
        ("uint16", {"nbits": 11}, 2047),
        ("uint16", {"nbits": 12}, 4095),
        ("float32", {}, 1),
        ("float64", {}, 1),
    ],
)
def test_the_divisor_follows_the_bits_in_use(
    tmp_path: Path, dtype: str, profile: dict[str, Any], divisor: float
) -> None:
    """A 12-bit photo divided by 65535 is black to the model."""
    pixels = _picture(dtype=dtype)
    tile = read_tile(_write(tmp_path / "a.tif", pixels, **profile))
    assert tile.divisor == divisor
    assert tile.pixels.dtype == dtype


@pytest.mark.parametrize("largest", [1.0, 1.3, 255.0])
def test_floats_are_on_the_scale_from_0_to_1(tmp_path: Path, largest: float) -> None:
    """A model would get values 255 times too large, and answer anything; a little glare is no error."""
    pixels = np.zeros((4, 20, 20), dtype=np.float32)
    pixels[1, 3, 3] = largest
    path = _write(tmp_path / "a.tif", pixels)
    if largest < 2:
        assert read_tile(path).divisor == 1
    else:
        with pytest.raises(TileError, match=r"^tile a\.tif: has floats up to 255, they must be on the 0-1 scale"):
            read_tile(path)


@pytest.mark.parametrize("dtype", ["int16", "uint32", "complex64"])
def test_data_types_without_a_scale_are_refused(tmp_path: Path, dtype: str) -> None:
    """Nobody knows what 1 is in them; a guess would be a silent one."""
    with pytest.raises(TileError, match=f"tile a.tif: data type {dtype} has no known scale; convert"):
        read_tile(_write(tmp_path / "a.tif", _picture(dtype=dtype)))


def test_a_tile_without_crs_is_refused_unless_one_is_given(tmp_path: Path) -> None:
    """Its lines would have no place on the map."""
    path = _write(tmp_path / "a.tif", _picture(), crs=None)
    with pytest.raises(TileError, match=r"tile a.tif: has no coordinate reference system \(CRS\); give it one"):
        read_tile(path)
    assert read_tile(path, crs="EPSG:26918").crs.to_epsg() == 26918
    known = _write(tmp_path / "b.tif", _picture())
    assert read_tile(known, crs="EPSG:26918").crs.to_epsg() == 3424
    with pytest.raises(UsageError, match="CRS 'nowhere' is unknown"):
        read_tile(path, crs="nowhere")


def test_a_tile_without_georeference_is_refused(tmp_path: Path) -> None:
    """It would land at the origin of its CRS, in the sea; and no warning may reach the terminal."""
    with pytest.warns(rasterio.errors.NotGeoreferencedWarning):
        path = _write(tmp_path / "a.tif", _picture(), transform=None, crs=None)
    with pytest.raises(TileError, match=r"tile a.tif: has no georeference; give it one"):
        read_tile(path)


@pytest.mark.parametrize("transform", [PLACE @ Affine.rotation(30), Affine(0.3, 0, 5e5, 0, 0.3, 5e5)])
def test_rotated_and_south_up_tiles_are_accepted(tmp_path: Path, transform: Affine) -> None:
    """Photos come as they were flown."""
    tile = read_tile(_write(tmp_path / "a.tif", _picture(), transform=transform))
    assert tile.transform.almost_equals(transform)
    assert tile.georeference.pixel_size(height=40, width=50).x == pytest.approx(
        0.3048 * np.hypot(transform.a, transform.d), rel=1e-3
    )


@pytest.mark.parametrize("layout", [{}, {"compress": "deflate"}, {"tiled": True, "blockxsize": 16, "blockysize": 16}])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_truncated_file_never_passes_for_a_whole_one(tmp_path: Path, layout: dict[str, Any], as_bytes: bool) -> None:
    """An upload that broke off must fail with a reason, not become a tile with black parts and fewer lines."""
    pixels = _picture()
    data = _write(tmp_path / "whole.tif", pixels, **layout).read_bytes()
    for length in [0, 1, 4, 100, *np.linspace(200, len(data) - 1, 12).astype(int).tolist()]:
        path = tmp_path / "part.tif"
        path.write_bytes(data[:length])
        try:
            tile = read_tile(data[:length] if as_bytes else path, name="part.tif")
        except CenterlinesError as error:
            message = str(error)
            assert "\n" not in message
            assert not re.search(r"vsimem|[0-9a-f]{8}-", message)
            assert str(tmp_path) not in message
            assert message.startswith("tile part.tif: ")
        else:  # only what no pixel needs was cut off
            np.testing.assert_array_equal(tile.pixels, pixels[[3, 1, 2]])


def test_a_file_that_cannot_be_read_says_why_in_gdals_words(tmp_path: Path) -> None:
    """Another try may succeed, so that it must be told apart from a tile without the right bands."""
    with pytest.raises(TileReadError, match=r"tile none.tif: cannot be read: .*No such file"):
        read_tile(tmp_path / "none.tif")
    text = tmp_path / "text.tif"
    text.write_text("hello")
    with pytest.raises(TileReadError, match=r"tile text.tif: cannot be read: .*not recognized"):
        read_tile(text)
    with pytest.raises(TileReadError, match=r"tile text.tif: cannot be read: .*not recognized"):
        read_tile(b"hello", name="text.tif")
    path = _write(tmp_path / "a.tif", _picture(height=400))
    path.write_bytes(path.read_bytes()[:30_000])
    with pytest.raises(TileReadError, match=r"tile a.tif: cannot be read: .*[Rr]ead"):
        read_tile(path)


def test_a_virtual_raster_is_not_a_tile(tmp_path: Path) -> None:
    """A .tif that is really a VRT could make the job read any other file of its machine."""
    _write(tmp_path / "secret.tif", _picture())
    vrt = tmp_path / "a.tif"
    vrt.write_text(
        '<VRTDataset rasterXSize="50" rasterYSize="40"><VRTRasterBand dataType="Byte" band="1"><SimpleSource>'
        f"<SourceFilename>{tmp_path / 'secret.tif'}</SourceFilename><SourceBand>1</SourceBand></SimpleSource>"
        "</VRTRasterBand></VRTDataset>"
    )
    with pytest.raises(TileReadError, match="not recognized"):
        read_tile(vrt)


def test_an_unknown_target_format_is_refused(tmp_path: Path) -> None:
    """A typing mistake in a tile job must not become another channel order."""
    with pytest.raises(UsageError, match="target format 'RGBN' is unknown; use 'NIR-GB'"):
        read_tile(tmp_path / "a.tif", target_format="RGBN")


def test_a_tile_survives_pickling(tmp_path: Path) -> None:
    """It is read in one process and used in another."""
    tile = read_tile(_write(tmp_path / "a.tif", _picture()))
    copy = pickle.loads(pickle.dumps(tile))  # noqa: S301
    np.testing.assert_array_equal(copy.pixels, tile.pixels)
    assert copy.georeference == tile.georeference
