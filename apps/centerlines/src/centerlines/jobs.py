"""Which tiles a run works on."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from centerlines.errors import UsageError
from centerlines.raster import BandRole

__all__ = ["TileJob", "TileKey", "build_tile_jobs"]

TileKey = tuple[str, str]
"""(job_id, tile_id)."""

TARGET_FORMAT = "NIR-GB"
# A file name may have 255 bytes, and the results' names add an ending and, while they are written, a prefix.
LONGEST_ID_BYTES = 200


@dataclass(frozen=True)
class TileJob:
    """One tile to be turned into lines, and how it is to be cut."""

    tif_path: str
    """Path of the GeoTIFF, or its key in the object store."""
    tile_id: str
    """Name of the tile's results, unique within the job."""
    job_id: str
    """Name of the set of tiles."""
    requested_chip_size: int = 256
    """Rows and columns of a chip in pixels."""
    requested_chip_overlap: int = 32
    """Pixels that neighbouring chips share."""
    use_pseudo_color_nir: bool = True
    """Give the model (NIR, green, blue) instead of (red, green, blue)."""
    target_format: str = "NIR-GB"
    """The model's channels."""
    target_model_input_size: tuple[int, int, int] = (3, 256, 256)
    """Channels, rows and columns of the model's input."""
    bands: Mapping[BandRole, int] | None = None
    """The band number, from 1, of some or all roles; what the file says when None."""

    @property
    def key(self) -> TileKey:
        """What identifies the tile in progress and in messages."""
        return (self.job_id, self.tile_id)


def build_tile_jobs(
    tif_paths: Sequence[str],
    job_id: str,
    *,
    requested_chip_size: int = 256,
    requested_chip_overlap: int = 32,
    use_pseudo_color_nir: bool = True,
    target_format: str = "NIR-GB",
    target_model_input_size: Sequence[int] | None = None,
    bands: Mapping[BandRole, int] | None = None,
) -> list[TileJob]:
    """Make one job a tile, in the order given.

    A tile's id is its file name without the ending; where two files share a name, as much of their folders goes in
    front as tells them apart. An id can be a file's name: characters that cannot be printed become `_`, leading dots
    are left out, and what is too long is cut.

    Args:
        tif_paths: paths, or keys in an object store.
        job_id: name of this set of tiles.
        requested_chip_size: rows and columns of a chip in pixels.
        requested_chip_overlap: pixels that neighbouring chips share.
        use_pseudo_color_nir: give the model (NIR, green, blue) instead of (red, green, blue).
        target_format: the model's channels; `NIR-GB` is the only one.
        target_model_input_size: channels, rows and columns of the model's input; those of a chip when left out.
        bands: the band number, from 1, of some or all roles.

    Raises:
        UsageError: a path is empty or given twice, the sizes do not fit together, or a name cannot be used.
    """
    if not job_id.isprintable():
        raise UsageError(f"job id {job_id!r}: must be of characters that can be printed")
    if target_format != TARGET_FORMAT:
        raise UsageError(f"target format {target_format!r} is unknown; use {TARGET_FORMAT!r}")
    size = requested_chip_size
    if not 16 <= size <= 4096:
        raise UsageError(f"chip size {size}: must be from 16 to 4096 pixels")
    if not 0 <= requested_chip_overlap <= size // 2:
        raise UsageError(f"chip overlap {requested_chip_overlap}: must be from 0 to half the chip size, {size // 2}")
    input_size = (3, size, size) if target_model_input_size is None else tuple(target_model_input_size)
    if input_size != (3, size, size):
        raise UsageError(f"model input size {list(input_size)}: must be [3, {size}, {size}], as the chips are")
    if "" in tif_paths:
        raise UsageError("tile '': must be the path of a GeoTIFF")
    if repeated := [path for path, count in Counter(tif_paths).items() if count > 1]:
        raise UsageError(f"tile {repeated[0]} is given twice")
    return [
        TileJob(
            tif_path=path,
            tile_id=tile_id,
            job_id=job_id,
            requested_chip_size=size,
            requested_chip_overlap=requested_chip_overlap,
            use_pseudo_color_nir=use_pseudo_color_nir,
            target_format=target_format,
            target_model_input_size=(3, size, size),
            bands=bands,
        )
        for path, tile_id in zip(tif_paths, _tile_ids(tif_paths), strict=True)
    ]


def _tile_ids(paths: Sequence[str]) -> list[str]:
    """Name each path by its last parts, one part at first and one more as long as others have the same name."""
    parts = [_printable_parts(path) for path in paths]
    ids = [names[-1] for names in parts]
    for depth in range(2, max(map(len, parts), default=0) + 1):
        shared = {name for name, count in Counter(ids).items() if count > 1}
        if not shared:
            break
        ids = ["-".join(names[-depth:]) if name in shared else name for name, names in zip(ids, parts, strict=True)]
    return _numbered([_shortened(name) for name in ids])


def _printable_parts(path: str) -> list[str]:
    """Return the folders and the name without its ending, as they may stand in a file's name."""
    pure = PurePosixPath("".join(char if char.isprintable() else "_" for char in path))
    return [part.lstrip(".") or "_" for part in (*pure.parent.parts, pure.stem) if part != "/"]


def _shortened(name: str) -> str:
    if len(name.encode()) <= LONGEST_ID_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{name.encode()[: LONGEST_ID_BYTES - 17].decode(errors='ignore')}-{digest}"


def _numbered(names: Sequence[str]) -> list[str]:
    """Tell apart what is still shared: names that differ in their endings (a.tif, a.tiff) or in odd characters."""
    taken = set(names)
    counters: dict[str, itertools.count[int]] = {}
    ids = []
    for name in names:
        if name not in counters:
            counters[name] = itertools.count(2)
            ids.append(name)
            continue
        ids.append(next(new for number in counters[name] if (new := f"{name}-{number}") not in taken))
        taken.add(ids[-1])
    return ids
