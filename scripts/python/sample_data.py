"""Street lines and an aerial photo for samples, taken out of two published Python wheels.

``python sample_data.py`` puts the wheels' files into the user's cache, once; the paths are then asked for by name.
"""

import subprocess
import sys
from pathlib import Path

from cache import build_once, cache_folder

__all__ = ["SampleDataError", "aerial_photo_path", "data_folder", "install", "street_lines_path"]

NEATNET_VERSION = "0.1.6"
DEEPFOREST_VERSION = "2.1.0"

STREET_LINES = Path("neatnet/tests/data/apalachicola_original.parquet")
AERIAL_PHOTO = Path("deepforest/data/OSBS_029.tif")


class SampleDataError(Exception):
    """The sample data cannot be found or installed; the message is one line for the user."""


def data_folder() -> Path:
    """Returns the folder with the data of the pinned versions, in the cache that ``TRITON_ON_RAY_CACHE`` names."""
    return cache_folder() / f"sample-data-neatnet{NEATNET_VERSION}-deepforest{DEEPFOREST_VERSION}"


def street_lines_path() -> Path:
    """Returns the GeoParquet file with the street lines of Apalachicola, Florida (EPSG:3857)."""
    return _find(STREET_LINES)


def aerial_photo_path() -> Path:
    """Returns a real aerial GeoTIFF: 3 bands of 8 bits, 10 cm pixels, nodata 255."""
    return _find(AERIAL_PHOTO)


def _find(relative: Path) -> Path:
    path = data_folder() / relative
    if not path.is_file():
        raise SampleDataError(f"sample data {path} is missing; run scripts/setup to install it")
    return path


def install() -> Path:
    """Installs the wheels' files unless they are there already, and returns their folder.

    Raises:
        SampleDataError: pip could not install the wheels.
    """
    build_once(data_folder(), _install_wheels)
    return data_folder()


def _install_wheels(folder: Path) -> None:
    wheels = [f"neatnet=={NEATNET_VERSION}", f"deepforest=={DEEPFOREST_VERSION}"]
    # The data need none of the libraries that these packages depend on.
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), *wheels]
    if subprocess.run(command, check=False).returncode != 0:
        raise SampleDataError(f"pip could not install {' and '.join(wheels)}; its message stands above")


if __name__ == "__main__":
    try:
        print(f"sample data: {install()}")
    except SampleDataError as error:
        sys.exit(f"sample_data: {error}")
