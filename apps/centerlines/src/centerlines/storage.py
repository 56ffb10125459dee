"""Where tiles come from and where results go."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from centerlines.errors import CenterlinesError, TileReadError, UsageError

__all__ = ["TileSource", "find_tiles", "list_s3_files", "s3_store", "write_whole"]

SUFFIXES = (".tif", ".tiff")


def s3_store(bucket: str) -> S3Store:
    """Return a store for one bucket, with credentials, region and endpoint from the usual AWS_* variables.

    Raises:
        UsageError: the bucket's name or a variable is wrong.
    """
    if not re.fullmatch(r"[A-Za-z0-9._-]+", bucket):
        raise UsageError(f"s3 bucket {bucket!r}: is no name of a bucket; write s3://BUCKET/PREFIX")
    # AWS_ENDPOINT_URL is what the AWS tools read; a plain http endpoint must be allowed by name.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and not re.fullmatch(r"https?://\S+", endpoint):
        raise UsageError(f"AWS_ENDPOINT_URL {endpoint!r}: write https://HOST or http://HOST:PORT")
    config: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    plain_http = bool(endpoint and endpoint.startswith("http://"))
    try:
        return S3Store(bucket, **config, client_options={"allow_http": plain_http})
    except BaseError as error:
        raise UsageError(f"s3 bucket {bucket!r}: check the AWS_* variables: {_reason(error)}") from error


def list_s3_files(store: S3Store, prefix: str) -> list[str]:
    """List the keys of the GeoTIFFs below a prefix, sorted; if nothing is below it, those that begin with it.

    Raises:
        UsageError: the bucket cannot be listed.
    """
    try:
        # The store takes a prefix for a folder: neither a whole key nor the beginning of a name finds anything.
        keys = _keys(store, prefix) or [
            key for key in _keys(store, prefix.rpartition("/")[0]) if key.startswith(prefix)
        ]
    except (BaseError, OSError) as error:
        raise UsageError(f"s3://{store.config['bucket']}/{prefix}: cannot be listed: {_reason(error)}") from error
    return sorted(key for key in keys if _is_tile(key.rpartition("/")[2]))


def _keys(store: S3Store, folder: str) -> list[str]:
    return [entry["path"] for page in obstore.list(store, folder or None) for entry in page]


def _is_tile(name: str) -> bool:
    """Tell by its name whether a file is a GeoTIFF; what is hidden is a leftover or a system's own."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


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
            raise TileReadError(f"tile {path}: cannot be fetched: {_reason(error)}") from error


def find_tiles(sources: Sequence[str]) -> tuple[list[str], TileSource]:
    """Find the GeoTIFFs that command line arguments name.

    Args:
        sources: files, folders, or s3://bucket/prefix; all of one kind, and in one bucket.

    Returns:
        The tiles, sorted within each argument, and where to read them.

    Raises:
        UsageError: an argument names nothing, or kinds are mixed.
    """
    # A key may hold any character, so a URL's own rules for ? and # do not apply.
    split = {source: source.removeprefix("s3://").partition("/") for source in sources if source.startswith("s3://")}
    buckets = {bucket for bucket, _, _ in split.values()}
    if not buckets:
        return [path for source in sources for path in _local_tiles(source)], TileSource()
    if len(buckets) > 1 or not all(source in split for source in sources):
        raise UsageError(f"{' '.join(sources)}: tiles of one run must be local, or all in one bucket")
    store = s3_store(buckets.pop())
    keys = []
    for source, (_, _, prefix) in split.items():
        found = list_s3_files(store, prefix)
        if not found:
            raise UsageError(f"{source}: no GeoTIFF (*.tif, *.tiff) there")
        keys += found
    return keys, TileSource(store)


def _local_tiles(source: str) -> list[str]:
    if not source:
        raise UsageError("tile '': name a file or a folder, this is empty")
    # One spelling for one file, so that it is not worked on twice.
    path = Path(os.path.normpath(source))
    try:
        if path.is_file():
            return [str(path)]
        if not path.is_dir():
            raise UsageError(f"{source}: no such file or folder")
        found = sorted(str(file) for file in path.rglob("*") if _is_tile(file.name) and file.is_file())
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}") from error
    if not found:
        raise UsageError(f"{source}: no GeoTIFF (*.tif, *.tiff) in this folder")
    return found


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise CenterlinesError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    """Say in one line why a request failed, in the server's own words where it gave some."""
    text = " ".join(str(error).partition("Debug source:")[0].split())
    answer = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text)
    return ": ".join(answer.groups()) if answer else text
