"""Where scripts/setup keeps what is costly to fetch or build, outside the clone."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """Return TRITON_ON_RAY_CACHE, or ~/.cache/triton-on-ray."""
    return Path(os.environ.get("TRITON_ON_RAY_CACHE") or Path.home() / ".cache/triton-on-ray")


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill `folder`, unless an earlier call has done so; safe when several programs ask at once.

    The folder is built in its place, because a virtual environment cannot be moved, and a marker in it says that it is
    whole: what a stopped build left is removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    marker = folder / ".complete"
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if marker.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        build(folder)
        marker.touch()
