"""Writes a sample scene: adjoining 4-band aerial tiles of a town, and the sidewalks' true centerlines beside them.

The streets are real, at true scale; all else is drawn (see ``sample_town`` and ``sample_render``). Tiles are
Cloud-Optimized GeoTIFFs in EPSG:3424 with pixels of one US survey foot, placed in the middle of New Jersey. The truth
is GeoJSON (RFC 7946). The same arguments give the same pixels and lines.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyproj
import rasterio
import rasterio.shutil
import shapely
from rasterio.enums import ColorInterp

from sample_data import SampleDataError, street_lines_path
from sample_render import METRES_PER_PIXEL, Renderer
from sample_town import Sidewalk, StreetDataError, build_town, read_streets

__all__ = ["CRS", "Scene", "main", "write_scene"]

CRS = "EPSG:3424"
CENTRE_FT = (500_000, 550_000)
SMALLEST_PX, LARGEST_PX, MOST_TILES = 300, 5000, 20
SHORTEST_PIECE_M = 0.05  # what a tile's edge cuts off shorter than this is no line


@dataclass(frozen=True)
class Scene:
    """Size and seed of a scene."""

    size: int
    """Width and height of a tile in pixels."""
    columns: int
    """Tiles from west to east."""
    rows: int
    """Tiles from north to south."""
    seed: int
    """Decides all that is drawn round the streets."""

    @property
    def bounds_m(self) -> tuple[float, float, float, float]:
        """West, south, east, north in metres from the centre."""
        left, top = -(self.columns * self.size // 2), -(self.rows * self.size // 2)
        return self._metres(left, top, self.columns * self.size, self.rows * self.size)

    def tiles(self) -> Iterator["Tile"]:
        """Yields the tiles row by row."""
        left, top = -(self.columns * self.size // 2), -(self.rows * self.size // 2)
        for row in range(self.rows):
            for column in range(self.columns):
                first_column, first_row = left + column * self.size, top + row * self.size
                bounds = self._metres(first_column, first_row, self.size, self.size)
                yield Tile(f"tile_r{row}_c{column}", first_column, first_row, self.size, bounds)

    @staticmethod
    def _metres(column: int, row: int, width: int, height: int) -> tuple[float, float, float, float]:
        west, south, east, north = (
            value * METRES_PER_PIXEL for value in (column, -(row + height), column + width, -row)
        )
        return west, south, east, north


@dataclass(frozen=True)
class Tile:
    """One tile of a scene."""

    name: str
    """File name without suffix."""
    column: int
    """First pixel column, from the scene's centre."""
    row: int
    """First pixel row, from the scene's centre."""
    size: int
    """Width and height in pixels."""
    bounds_m: tuple[float, float, float, float]
    """West, south, east, north in metres from the centre."""


def write_scene(scene: Scene, output_dir: Path, street_data: Path) -> Iterator[tuple[Path, list[Sidewalk]]]:
    """Writes a scene's files and yields each with the sidewalks it shows, the scene's truth last.

    Raises:
        StreetDataError: The street data cannot be used.
        OSError: A file cannot be written.
    """
    town = build_town(read_streets(street_data), scene.bounds_m, scene.seed)
    renderer = Renderer(town, scene.seed)
    output_dir.mkdir(parents=True, exist_ok=True)
    for tile in scene.tiles():
        path = output_dir / f"{tile.name}.tif"
        pixels = renderer.draw(column=tile.column, row=tile.row, width=tile.size, height=tile.size)
        _write_tile(path, pixels, tile)
        shown = _clip(town.sidewalks, tile.bounds_m)
        _write_truth(output_dir / f"{tile.name}.truth.geojson", shown)
        yield path, shown
    shown = _clip(town.sidewalks, scene.bounds_m)
    _write_truth(output_dir / "truth.geojson", shown)
    yield output_dir / "truth.geojson", shown


def _write_tile(path: Path, pixels: npt.NDArray[np.uint8], tile: Tile) -> None:
    profile = {
        "driver": "MEM",
        "width": tile.size,
        "height": tile.size,
        "count": 4,
        "dtype": "uint8",
        "crs": CRS,
        "transform": rasterio.Affine(1, 0, CENTRE_FT[0] + tile.column, 0, -1, CENTRE_FT[1] - tile.row),
    }
    options = {"compress": "deflate", "predictor": "yes", "blocksize": 512, "overview_resampling": "average"}
    with _replacing(path) as temporary, rasterio.io.MemoryFile() as memory, memory.open(**profile) as dataset:
        dataset.write(pixels)
        dataset.descriptions = ("red", "green", "blue", "nir")
        # Without this GDAL takes the fourth band for transparency.
        dataset.colorinterp = (ColorInterp.red, ColorInterp.green, ColorInterp.blue, ColorInterp.undefined)
        rasterio.shutil.copy(dataset, temporary, driver="COG", **options)


def _clip(sidewalks: Sequence[Sidewalk], bounds_m: tuple[float, float, float, float]) -> list[Sidewalk]:
    """Cuts the sidewalks at a rectangle."""
    area = shapely.box(*bounds_m)
    lines = np.array([sidewalk.line for sidewalk in sidewalks], dtype=object)
    return [
        Sidewalk(part, sidewalk.width_m, sidewalk.kind)
        for sidewalk, clipped in zip(sidewalks, shapely.intersection(lines, area), strict=True)
        for part in shapely.get_parts(shapely.line_merge(clipped))
        if part.length >= SHORTEST_PIECE_M
    ]


def _write_truth(path: Path, sidewalks: Sequence[Sidewalk]) -> None:
    to_degrees = pyproj.Transformer.from_crs(CRS, "OGC:CRS84", always_xy=True)

    def feature(sidewalk: Sidewalk) -> dict[str, Any]:
        x, y = (shapely.get_coordinates(sidewalk.line) / METRES_PER_PIXEL + CENTRE_FT).T
        # 9 decimals are 0.1 mm.
        coordinates = np.round(np.column_stack(to_degrees.transform(x, y)), 9).tolist()
        properties = {
            "kind": sidewalk.kind,
            "width_m": sidewalk.width_m,
            "length_m": round(float(sidewalk.line.length), 3),
        }
        geometry = {"type": "LineString", "coordinates": coordinates}
        return {"type": "Feature", "properties": properties, "geometry": geometry}

    collection = {"type": "FeatureCollection", "features": [feature(sidewalk) for sidewalk in sidewalks]}
    with _replacing(path) as temporary:
        temporary.write_text(json.dumps(collection) + "\n")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path that takes the place of a file at the end, so that no one reads half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Says what is wrong in one line."""
        self.exit(2, f"{self.prog}: {message}\n")


def _whole_number(low: int, high: int) -> Any:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse


def _tiles(text: str) -> tuple[int, int]:
    columns, _, rows = text.partition("x")
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_TILES for part in (columns, rows)):
        raise argparse.ArgumentTypeError(f"{text!r} is not COLUMNSxROWS, each from 1 to {MOST_TILES}, such as 2x2")
    return int(columns), int(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 0, 1 if it could not be done, 2 for bad arguments."""
    parser = _Parser(prog="make-sample", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="folder for the files, made if missing")
    size = _whole_number(SMALLEST_PX, LARGEST_PX)
    parser.add_argument("--size", type=size, default=2000, help="pixels of a tile's side, 300 to 5000 (%(default)s)")
    parser.add_argument("--tiles", type=_tiles, default=(2, 2), metavar="CxR", help="columns and rows of tiles (2x2)")
    parser.add_argument("--seed", type=_whole_number(0, 2**32 - 1), default=1, help="another town (%(default)s)")
    parser.add_argument(
        "--street-data", type=Path, help="GeoParquet file of street lines (those scripts/setup installs)"
    )
    options = parser.parse_args(arguments)
    columns, rows = options.tiles
    scene = Scene(options.size, columns, rows, options.seed)
    names = {f"{tile.name}.tif" for tile in scene.tiles()}
    strangers = sorted(path.name for path in options.output_dir.glob("tile_r*_c*.tif") if path.name not in names)
    if strangers:
        parser.error(f"{options.output_dir} holds {strangers[0]} of another scene; name an empty folder")
    started = time.monotonic()
    try:
        files = write_scene(scene, options.output_dir, options.street_data or street_lines_path())
        for number, (path, shown) in enumerate(files):
            if number == 0:
                print(f"{'file':<24}{'lines':>7}{'metres':>9}{'MB':>7}")
            length = sum(sidewalk.line.length for sidewalk in shown)
            print(f"{path.name:<24}{len(shown):>7}{length:>9.0f}{path.stat().st_size / 1e6:>7.1f}", flush=True)
    except StreetDataError as error:
        parser.error(str(error))
    except (SampleDataError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"{options.output_dir}: {scene.columns} x {scene.rows} tiles in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
