"""Sidewalk centerlines from aerial GeoTIFF tiles, through a Triton endpoint."""

from typing import TYPE_CHECKING, Any

from centerlines.errors import CenterlinesError, EndpointError, TileError, TileReadError, UsageError
from centerlines.jobs import TileJob, build_tile_jobs
from centerlines.storage import list_s3_files, s3_store

if TYPE_CHECKING:
    from centerlines.controller import RunResult, main

__all__ = [
    "CenterlinesError",
    "EndpointError",
    "RunResult",
    "TileError",
    "TileJob",
    "TileReadError",
    "UsageError",
    "build_tile_jobs",
    "list_s3_files",
    "main",
    "s3_store",
]


def __getattr__(name: str) -> Any:
    """Import what needs Ray only when it is asked for; everything else works, and starts faster, without."""
    if name in {"main", "RunResult"}:
        from centerlines import controller

        return getattr(controller, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
