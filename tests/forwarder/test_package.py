"""The package as the chart mounts it."""

import ast
import re
import sys
from importlib import metadata
from pathlib import Path

import triton_forwarder

FOLDER = Path(triton_forwarder.__file__).parent


def _imported(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import does not say what it depends on"
            names.add(str(node.module))
    return {name.partition(".")[0] for name in names}


def test_the_forwarder_imports_only_what_every_ray_image_has() -> None:
    """Otherwise the pods of an operator with the stock Ray image would die at their start."""
    # Ray Serve's own client for HTTP, and that client's URLs; the test below looks whether it still is.
    allowed = sys.stdlib_module_names | {"ray", "grpc", "aiohttp", "yarl", "triton_forwarder"}
    for file in FOLDER.glob("*.py"):
        assert not _imported(file.read_text()) - allowed, file.name


def test_ray_serve_brings_the_libraries_of_http() -> None:
    """A Ray without aiohttp would leave the pods of the stock image without what `http.py` imports."""
    assert any(re.match(r"aiohttp\b.*extra == .serve.", line) for line in metadata.requires("ray") or ())
    assert any(re.match(r"yarl\b[^;]*$", line) for line in metadata.requires("aiohttp") or ())


def test_the_forwarder_is_flat_and_small_enough_for_a_config_map() -> None:
    """A ConfigMap has no folders: a file in one would be missing in the pods. Kubernetes takes 1 MiB of it."""
    files = [path for path in FOLDER.iterdir() if path.name != "__pycache__"]
    assert all(path.is_file() and path.suffix == ".py" for path in files)
    assert 0 < sum(path.stat().st_size for path in files) < 1_000_000
