"""Where tiles come from and where results go."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from centerlines.errors import TileReadError, UsageError

__all__ = ["TileSource", "find_tiles", "list_s3_files", "s3_store", "write_whole"]

SUFFIXES = (".tif", ".tiff")


def s3_store(bucket: str) -> S3Store:
    """Return a store for one bucket, with credentials, region and endpoint from the usual AWS_* variables."""
    # AWS_ENDPOINT_URL is what the AWS tools read; a plain http endpoint must be allowed by name.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    return S3Store(bucket, **config, client_options={"allow_http": bool(endpoint and endpoint.startswith("http://"))})


def list_s3_files(store: S3Store, prefix: str) -> list[str]:
    """List the keys of the GeoTIFFs below a prefix, sorted.

    Raises:
        UsageError: the bucket cannot be listed.
    """
    try:
        keys = [entry["path"] for page in obstore.list(store, prefix or None) for entry in page]
    except (BaseError, OSError) as error:
        raise UsageError(f"s3 prefix {prefix!r}: cannot be listed: {_first_line(error)}") from error
    return sorted(key for key in keys if key.lower().endswith(SUFFIXES))


@dataclass(frozen=True)
class TileSource:
    """Reads tiles from this machine, or from a bucket."""

    store: S3Store | None = None
    """The bucket that tile paths are keys of; None for files."""

    def open(self, path: str) -> str | bytes:
        """Return what rasterio reads: the path of a file, or a whole object.

        Raises:
            TileReadError: the object cannot be fetched.
        """
        if self.store is None:
            return path
        try:
            return bytes(obstore.get(self.store, path).bytes())
        except (BaseError, OSError) as error:
            raise TileReadError(f"tile {path}: cannot be fetched: {_first_line(error)}") from error


def find_tiles(sources: Sequence[str]) -> tuple[list[str], TileSource]:
    """Find the GeoTIFFs that command line arguments name.

    Args:
        sources: files, folders, or s3://bucket/prefix; all of one kind, and in one bucket.

    Returns:
        The tiles, sorted within each argument, and where to read them.

    Raises:
        UsageError: an argument names nothing, or kinds are mixed.
    """
    buckets = {urlsplit(source).netloc for source in sources if source.startswith("s3://")}
    if not buckets:
        return [path for source in sources for path in _local_tiles(source)], TileSource()
    if len(buckets) > 1 or not all(source.startswith("s3://") for source in sources):
        raise UsageError(f"{' '.join(sources)}: tiles of one run must be local, or all in one bucket")
    store = s3_store(buckets.pop())
    keys = []
    for source in sources:
        # A key may hold any character, so the URL's own rules for ? and # do not apply.
        prefix = source.removeprefix("s3://").partition("/")[2]
        found = list_s3_files(store, prefix)
        if not found:
            raise UsageError(f"{source}: no GeoTIFF (*.tif, *.tiff) there")
        keys += found
    return keys, TileSource(store)


def _local_tiles(source: str) -> list[str]:
    path = Path(source)
    if path.is_file():
        return [str(path)]
    if not path.is_dir():
        raise UsageError(f"{source}: no such file or folder")
    found = sorted(str(file) for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not found:
        raise UsageError(f"{source}: no GeoTIFF (*.tif, *.tiff) in this folder")
    return found


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
