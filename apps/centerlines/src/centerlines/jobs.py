"""Which tiles a run works on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from centerlines.errors import UsageError
from centerlines.raster import BandRole

__all__ = ["TileJob", "TileKey", "build_tile_jobs"]

TileKey = tuple[str, str]
"""(job_id, tile_id)."""


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
    front as tells them apart.

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
        UsageError: a path is given twice, or the sizes do not fit together.
    """
    size = requested_chip_size
    if size < 16:
        raise UsageError(f"chip size {size}: must be at least 16 pixels")
    if not 0 <= requested_chip_overlap <= size // 2:
        raise UsageError(f"chip overlap {requested_chip_overlap}: must be from 0 to half the chip size, {size // 2}")
    input_size = (3, size, size) if target_model_input_size is None else tuple(target_model_input_size)
    if input_size != (3, size, size):
        raise UsageError(f"model input size {list(input_size)}: must be [3, {size}, {size}], as the chips are")
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
    parts = [PurePosixPath(path).with_suffix("").parts for path in paths]
    ids = [names[-1] for names in parts]
    for depth in range(2, max(map(len, parts), default=0) + 1):
        shared = {name for name, count in Counter(ids).items() if count > 1}
        if not shared:
            break
        ids = ["-".join(names[-depth:]) if name in shared else name for name, names in zip(ids, parts, strict=True)]
    # What is still shared differs in its ending (a.tif, a.tiff), or in characters of its folders.
    for name, count in Counter(ids).items():
        if count > 1:
            same = [index for index, other in enumerate(ids) if other == name]
            for number, index in enumerate(same[1:], start=2):
                ids[index] = f"{name}-{number}"
    return [name.replace("/", "") for name in ids]
