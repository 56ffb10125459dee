"""The command `centerlines compare`: results against known centerlines."""

import argparse
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from pyproj import Transformer
from rasterio.errors import NotGeoreferencedWarning, RasterioError
from rich.console import Console
from rich.table import Table
from shapely.geometry import LineString, Polygon

from centerlines.compare import LoopCount, NetworkComparison, compare_networks, loops_kept
from centerlines.errors import UsageError
from centerlines.georeference import Georeference
from centerlines.jobs import build_tile_jobs
from centerlines.storage import find_tiles

__all__ = ["Comparison", "add_compare", "compare", "compare_tiles"]


@dataclass(frozen=True)
class Comparison:
    """The comparison of several tiles, each by itself: lines are not yet joined across tiles."""

    tiles: tuple[NetworkComparison, ...]
    """One a tile."""
    loops: tuple[LoopCount, ...]
    """Loops of the truth that lie within one tile, one count a tile."""

    @property
    def found_length_m(self) -> float:
        """Length of the found lines in metres."""
        return sum(tile.found_length_m for tile in self.tiles)

    @property
    def truth_length_m(self) -> float:
        """Length of the true lines in metres."""
        return sum(tile.truth_length_m for tile in self.tiles)

    @property
    def completeness(self) -> float:
        """Share of the true length that was found."""
        return _mean([(tile.completeness, tile.truth_length_m) for tile in self.tiles])

    @property
    def correctness(self) -> float:
        """Share of the found length that is true."""
        return _mean([(tile.correctness, tile.found_length_m) for tile in self.tiles])

    @property
    def quality(self) -> float:
        """Completeness and correctness in one number."""
        both = self.completeness * self.correctness
        either = self.completeness + self.correctness - both
        return both / either if either else 0.0

    @property
    def loops_kept(self) -> LoopCount:
        """Loops of the truth that lie within a tile."""
        return LoopCount(kept=sum(count.kept for count in self.loops), total=sum(count.total for count in self.loops))


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total else 1.0


def compare_tiles(results: Path, truth: Path, tiles: Sequence[str], *, buffer_m: float) -> Comparison:
    """Compare the results of a run with known centerlines, tile by tile.

    Args:
        results: the run's output folder.
        truth: GeoJSON of LineStrings in WGS 84.
        tiles: the GeoTIFFs of the run.
        buffer_m: how far apart two lines may lie to be the same.

    Raises:
        UsageError: a file is missing or cannot be read.
    """
    truth_lines = _read_lines(truth)
    comparisons, loops = [], []
    for job in build_tile_jobs(tiles, "compare"):
        outline = _outline(job.tif_path)
        to_metres = _local_metres(outline)
        area = Polygon(to_metres(outline))
        found = [
            LineString(to_metres(line)) for line in _read_lines(results / "centerlines" / f"{job.tile_id}.geojson")
        ]
        near = area.buffer(20)
        true = [line for line in (LineString(to_metres(points)) for points in truth_lines) if line.intersects(near)]
        comparisons.append(compare_networks(found, true, buffer_m=buffer_m, area=area))
        loops.append(loops_kept(found, true, area=area))
    return Comparison(tuple(comparisons), tuple(loops))


def _local_metres(outline: np.ndarray[Any, Any]) -> Any:
    """Return a function from longitude and latitude (n, 2) to metres on a plane that touches the earth at the tile."""
    lon, lat = outline.mean(axis=0)
    transformer = Transformer.from_crs(
        "EPSG:4326", f"+proj=tmerc +lat_0={lat} +lon_0={lon} +k=1 +datum=WGS84 +units=m", always_xy=True
    )
    return lambda lonlat: np.column_stack(transformer.transform(lonlat[:, 0], lonlat[:, 1]))


def _outline(path: str) -> np.ndarray[Any, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotGeoreferencedWarning)
            with rasterio.open(path) as dataset:
                if dataset.crs is None or dataset.transform.is_identity:
                    raise UsageError(f"tile {path}: has no georeference")
                georeference = Georeference(dataset.transform, dataset.crs.to_wkt())
                return georeference.outline(height=dataset.height, width=dataset.width)
    except RasterioError as error:
        raise UsageError(f"tile {path}: cannot be read as GeoTIFF") from error


def _read_lines(path: Path) -> list[np.ndarray[Any, Any]]:
    try:
        features = json.loads(path.read_text())["features"]
        lines = []
        for feature in features:
            geometry = feature["geometry"]
            parts = [geometry["coordinates"]] if geometry["type"] == "LineString" else geometry["coordinates"]
            lines += [np.array(part, dtype=np.float64)[:, :2] for part in parts]
        if any(len(line) < 2 for line in lines):
            raise ValueError("a line needs two positions")  # noqa: TRY301  told like what the parser finds
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"{path}: cannot be read as GeoJSON of lines ({error})") from error
    return lines


def add_compare(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    command: argparse.ArgumentParser = commands.add_parser(
        "compare",
        help="compare results with known centerlines",
        description="Compare the results of a run with known centerlines, tile by tile.",
    )
    command.add_argument("tiles", metavar="TILE_OR_FOLDER", nargs="+", help="the GeoTIFFs of the run")
    command.add_argument("--results", metavar="DIR", type=Path, required=True, help="the run's output folder")
    command.add_argument("--truth", metavar="FILE", type=Path, required=True, help="GeoJSON of the true lines")
    command.add_argument(
        "--buffer", metavar="METRES", type=float, default=0.5, help="how far apart lines may be (default: 0.5)"
    )
    command.add_argument("--require-quality", metavar="Q", type=float, help="exit with 1 below this quality")
    command.add_argument("--require-loops", action="store_true", help="exit with 1 unless every loop was kept")
    return command


def compare(given: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    if not 0 < given.buffer < math.inf:
        raise UsageError(f"--buffer {given.buffer:g}: must be more than 0 metres")
    if given.require_quality is not None and not 0 <= given.require_quality <= 1:
        raise UsageError(f"--require-quality {given.require_quality:g}: must be from 0 to 1")
    if remote := [tile for tile in given.tiles if tile.startswith("s3://")]:
        raise UsageError(f"{remote[0]}: compare reads tiles of this machine only; download them")
    paths, _ = find_tiles(given.tiles)
    result = compare_tiles(given.results, given.truth, paths, buffer_m=given.buffer)
    loops = result.loops_kept
    table = Table(title=f"{len(result.tiles)} tiles, found against truth", title_justify="left")
    table.add_column("")
    table.add_column("found", justify="right")
    table.add_column("truth", justify="right")
    table.add_row("length (m)", f"{result.found_length_m:.0f}", f"{result.truth_length_m:.0f}")
    for name in ("components", "dead_ends", "loops"):
        found, true = (sum(getattr(getattr(tile, side), name) for tile in result.tiles) for side in ("found", "truth"))
        table.add_row(name.replace("_", " "), str(found), str(true))
    table.add_row("loops within a tile, kept", str(loops.kept), str(loops.total))
    table.add_section()
    for name in ("completeness", "correctness", "quality"):
        table.add_row(f"{name} at {given.buffer:g} m", f"{getattr(result, name):.4f}", "")
    Console().print(table)
    too_low = given.require_quality is not None and result.quality < given.require_quality
    lost = given.require_loops and loops.kept < loops.total
    return int(too_low or lost)
