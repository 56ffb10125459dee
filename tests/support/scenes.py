"""Sample scenes, each made once and then kept beside the other sample data."""

import hashlib
from pathlib import Path

import make_sample
import sample_colours
import sample_render
import sample_town
from cache import build_once, cache_folder
from sample_data import street_lines_path

_MAKERS = (make_sample, sample_colours, sample_render, sample_town)


def scene(*, size: int, columns: int, rows: int) -> Path:
    """Return the folder of a scene: `columns` x `rows` adjoining tiles of `size` pixels a side, and their truth.

    It is shared: tests copy what they change.
    """
    made_by = b"".join(Path(str(module.__file__)).read_bytes() for module in _MAKERS)
    name = f"scene-{size}px-{columns}x{rows}-{hashlib.sha256(made_by).hexdigest()[:12]}"
    folder = cache_folder() / name
    build_once(folder, lambda target: _draw(make_sample.Scene(size, columns, rows, seed=1), target))
    return folder


def _draw(drawn: make_sample.Scene, target: Path) -> None:
    for _ in make_sample.write_scene(drawn, target, street_lines_path()):
        pass


CRS = make_sample.CRS


def tiles(folder: Path) -> list[Path]:
    """Return the tiles of a scene, in the order of their names."""
    return sorted(folder.glob("*.tif"))
