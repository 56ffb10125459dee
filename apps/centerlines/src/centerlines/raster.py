"""Read the bands a model wants out of a GeoTIFF."""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import rasterio
from affine import Affine
from numpy.typing import NDArray
from rasterio.crs import CRS
from rasterio.enums import ColorInterp, MaskFlags
from rasterio.errors import CRSError, NodataShadowWarning, NotGeoreferencedWarning, RasterioError
from rasterio.io import MemoryFile

from centerlines.errors import TileError, TileReadError, UsageError
from centerlines.georeference import Georeference

__all__ = ["BandRole", "Tile", "parse_bands", "read_tile"]

BandRole = Literal["R", "G", "B", "NIR"]

_NAMES: dict[BandRole, str] = {"R": "red", "G": "green", "B": "blue", "NIR": "NIR"}
_ROLES_OF_DESCRIPTIONS: dict[str, BandRole] = {
    "red": "R",
    "green": "G",
    "blue": "B",
    "nir": "NIR",
    "near infrared": "NIR",
}
_ROLES_OF_COLOURS: dict[ColorInterp, BandRole] = {
    ColorInterp.red: "R",
    ColorInterp.green: "G",
    ColorInterp.blue: "B",
    ColorInterp.nir: "NIR",
}
_EXAMPLE = "--bands R=1,G=2,B=3,NIR=4"
_EXAMPLE_OF_THREE = "--bands NIR=1,G=2,B=3 if one of them is near infrared"


@dataclass(frozen=True)
class Tile:
    """The pixels of one GeoTIFF in the channels of the model."""

    name: str
    """What messages call the tile."""
    pixels: NDArray[Any]
    """Values as in the file (channels, height, width), in the file's dtype."""
    valid: NDArray[np.bool_]
    """False where the file has no data (height, width)."""
    divisor: float
    """What brings the values to the 0-1 scale."""
    transform: Affine
    """Pixel coordinates to CRS coordinates."""
    crs: CRS
    """The coordinate reference system."""

    @property
    def georeference(self) -> Georeference:
        """The way from pixels to metres and degrees."""
        return Georeference(self.transform, self.crs.to_wkt(version="WKT2_2019"))


def parse_bands(text: str) -> dict[BandRole, int]:
    """Parse ``R=1,G=2,B=3,NIR=4``, band numbers from 1, into a band number for each role.

    Raises:
        UsageError: a role is unknown or named twice, or a number is not one.
    """
    bands: dict[BandRole, int] = {}
    for part in text.split(","):
        role_text, _, number = (piece.strip() for piece in part.partition("="))
        role = next((known for known in get_args(BandRole) if known == role_text.upper()), None)
        if role is None or role in bands or not number.isdecimal() or int(number) < 1:
            raise UsageError(
                f"--bands {text!r}: {part.strip()!r} is not one of R, G, B, NIR, each once, with a band number from 1;"
                f" write for example {_EXAMPLE}"
            )
        bands[role] = int(number)
    return bands


def read_tile(
    source: str | Path | bytes,
    *,
    bands: Mapping[BandRole, int] | None = None,
    target_format: str = "NIR-GB",
    use_pseudo_color_nir: bool = True,
    crs: CRS | str | None = None,
    name: str | None = None,
) -> Tile:
    """Read a GeoTIFF in the channel order of the model.

    Args:
        source: a path, or the bytes of a whole file.
        bands: the band number, from 1, of some or all roles; wins over what the file says.
        target_format: the only one is ``NIR-GB``.
        use_pseudo_color_nir: read (NIR, green, blue); otherwise (red, green, blue).
        crs: what to assume when the file has no coordinate reference system.
        name: what messages call the tile; the file's name when left out.

    Raises:
        UsageError: the format or ``crs`` is unknown.
        TileError: a band, the georeference or a usable data type is missing.
        TileReadError: the file is damaged, truncated or not there.
    """
    if target_format != "NIR-GB":
        raise UsageError(f"target format {target_format!r} is unknown; use 'NIR-GB'")
    roles: tuple[BandRole, ...] = ("NIR", "G", "B") if use_pseudo_color_nir else ("R", "G", "B")
    fallback_crs = _parse_crs(crs)
    if name is None:
        name = "in memory" if isinstance(source, bytes) else Path(source).name
    try:
        with _open(source, name) as dataset:
            transform, file_crs = _georeference(dataset, fallback_crs, name)
            indexes = _choose_bands(dataset, roles, bands or {}, name)
            divisor = _divisor(dataset, indexes, name)
            pixels = dataset.read(indexes)
            valid = _valid(dataset, indexes, pixels)
            _check_floats(pixels, valid, name)
    except RasterioError as error:
        raise TileReadError(f"tile {name}: cannot be read: {_gdal_words(error, source, name)}") from error
    return Tile(name=name, pixels=pixels, valid=valid, divisor=divisor, transform=transform, crs=file_crs)


def _parse_crs(crs: CRS | str | None) -> CRS | None:
    try:
        return None if crs is None else CRS.from_user_input(crs)
    except CRSError as error:
        raise UsageError(f"CRS {crs!r} is unknown; write for example EPSG:3424") from error


@contextmanager
def _open(source: str | Path | bytes, name: str) -> Iterator[Any]:
    """Open as GeoTIFF only: a tile that is really a VRT could point at any other file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        warnings.simplefilter("ignore", NodataShadowWarning)
        if isinstance(source, bytes):
            # GDAL's messages show the last part of the path.
            with (
                MemoryFile(source, filename=Path(name).name) as memory,
                rasterio.open(memory.name, driver="GTiff") as dataset,
            ):
                yield dataset
        else:
            with rasterio.open(source, driver="GTiff") as dataset:
                yield dataset


def _gdal_words(error: RasterioError, source: str | Path | bytes, name: str) -> str:
    """Say on one line what GDAL said; rasterio's own text often only points at it."""
    words = " ".join(str(error.__cause__ or error).split())
    return re.sub(r"/vsimem/[^/]+/", "", words) if isinstance(source, bytes) else words.replace(str(source), name)


def _georeference(dataset: Any, fallback: CRS | None, name: str) -> tuple[Affine, CRS]:
    transform = dataset.transform
    if transform.is_identity or transform.is_degenerate:
        raise TileError(f"tile {name}: has no georeference; give it one, for example with gdal_edit.py -a_ullr")
    crs = dataset.crs or fallback
    if crs is None:
        raise TileError(
            f"tile {name}: has no coordinate reference system (CRS);"
            " give it one, for example with gdal_edit.py -a_srs EPSG:3424"
        )
    return transform, crs


def _choose_bands(dataset: Any, wanted: tuple[BandRole, ...], explicit: Mapping[BandRole, int], name: str) -> list[int]:
    """Find the band number of each wanted role."""
    for role in wanted:
        if explicit.get(role, 1) > dataset.count:
            raise TileError(
                f"tile {name}: {role}={explicit[role]} needs band {explicit[role]}, file has {dataset.count};"
                f" name the file's own bands with --bands"
            )
    found = {**_roles_in_file(dataset, explicit), **explicit}
    for role in wanted:
        if role not in found:
            labels = [
                text or colour.name for text, colour in zip(dataset.descriptions, dataset.colorinterp, strict=True)
            ]
            channels = "NIR-GB" if "NIR" in wanted else "RGB"
            noun = "band" if len(labels) == 1 else "bands"
            raise TileError(
                f"tile {name}: {channels} needs a {_NAMES[role]} band, the file has {len(labels)} {noun}"
                f" ({', '.join(labels)}); name the bands with {_EXAMPLE if len(labels) > 3 else _EXAMPLE_OF_THREE}"
            )
    return [found[role] for role in wanted]


def _roles_in_file(dataset: Any, explicit: Mapping[BandRole, int]) -> dict[BandRole, int]:
    """Collect what descriptions say about bands, then what colours say about the bands not described.

    A described band keeps its role: the first band of a colour-infrared photo is coloured red and described NIR.
    """
    roles: dict[BandRole, int] = {}
    described = set()
    for number, description in enumerate(dataset.descriptions, start=1):
        words = (description or "").strip().lower().replace("-", " ").replace("_", " ")
        if words in _ROLES_OF_DESCRIPTIONS:
            roles.setdefault(_ROLES_OF_DESCRIPTIONS[words], number)
            described.add(number)
    for number, colour in enumerate(dataset.colorinterp, start=1):
        if colour in _ROLES_OF_COLOURS and number not in described:
            roles.setdefault(_ROLES_OF_COLOURS[colour], number)
    known = {**roles, **explicit}
    if (
        dataset.count == 4
        and dataset.colorinterp[3] is ColorInterp.undefined
        and {known.get("R"), known.get("G"), known.get("B")} == {1, 2, 3}
    ):
        roles.setdefault("NIR", 4)
    return roles


def _divisor(dataset: Any, indexes: list[int], name: str) -> float:
    """Return the largest value of the data type, or of the bits in use where the file states them (11, 12)."""
    dtype = dataset.dtypes[indexes[0] - 1]
    if dtype in ("float32", "float64"):
        return 1.0
    if dtype not in ("uint8", "uint16"):
        raise TileError(
            f"tile {name}: data type {dtype} has no known scale; convert it to uint8, uint16 or 0-1 floats,"
            " for example with gdal_translate -ot Byte -scale"
        )
    bits = int(dataset.tags(indexes[0], ns="IMAGE_STRUCTURE").get("NBITS", 8 * np.dtype(dtype).itemsize))
    return float(2**bits - 1)


def _check_floats(pixels: NDArray[Any], valid: NDArray[np.bool_], name: str) -> None:
    """Refuse floats that are not on the 0-1 scale; a little more than 1 is glare in a reflectance."""
    if np.issubdtype(pixels.dtype, np.floating) and valid.any() and (largest := pixels[:, valid].max()) > 2:
        raise TileError(
            f"tile {name}: has floats up to {largest:.6g}, they must be on the 0-1 scale;"
            " convert it, for example with gdal_translate -scale"
        )


def _valid(dataset: Any, indexes: list[int], pixels: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell which pixels hold data (height, width).

    A pixel has none where the alpha band or the file's mask is 0, where a used band is not finite, and where every
    used band that declares a nodata value holds it. One band alone proves nothing: in a photo with nodata 255, a white
    roof reaches 255 in single bands.
    """
    valid: NDArray[np.bool_] = np.ones(pixels.shape[1:], dtype=np.bool_)
    alpha = next((i for i, colour in enumerate(dataset.colorinterp, start=1) if colour is ColorInterp.alpha), None)
    flags = dataset.mask_flag_enums[indexes[0] - 1]
    if alpha is not None and alpha not in indexes:
        valid &= dataset.read(alpha) > 0
    elif MaskFlags.per_dataset in flags and MaskFlags.alpha not in flags:
        valid &= dataset.read_masks(indexes[0]) > 0

    if np.issubdtype(pixels.dtype, np.floating):
        valid &= np.isfinite(pixels).all(axis=0)
    declared = [
        (band, dataset.nodatavals[index - 1])
        for band, index in zip(pixels, indexes, strict=True)
        if dataset.nodatavals[index - 1] is not None
    ]
    if declared:
        empty = np.ones_like(valid)
        for band, nodata in declared:
            empty &= band == _as_dtype(nodata, band.dtype)
        valid &= ~empty
    return valid


def _as_dtype(nodata: float, dtype: np.dtype[Any]) -> Any:
    """Bring a nodata value to the band's dtype; one it cannot hold stays as it is and equals no pixel."""
    if np.issubdtype(dtype, np.floating):
        return dtype.type(nodata)
    return int(nodata) if float(nodata).is_integer() else nodata
