"""The package as the chart mounts it."""

import ast
import sys
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
    allowed = sys.stdlib_module_names | {"ray", "grpc", "triton_forwarder"}
    for file in FOLDER.glob("*.py"):
        assert not _imported(file.read_text()) - allowed, file.name


def test_the_forwarder_is_flat_and_small_enough_for_a_config_map() -> None:
    """A ConfigMap has no folders: a file in one would be missing in the pods."""
    files = [path for path in FOLDER.iterdir() if path.name != "__pycache__"]
    assert all(path.is_file() and path.suffix == ".py" for path in files)
    assert len(files) <= 3
