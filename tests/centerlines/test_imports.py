"""Which module may import what, and what the package offers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import centerlines

PACKAGE = Path(centerlines.__file__).parent
MAY_IMPORT = {"ray": {"actors.py", "controller.py"}, "tritonclient": {"triton.py"}}


def imports_of(path: Path) -> set[str]:
    """The top-level packages that a module imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_only_the_thin_shell_knows_the_framework(package: str) -> None:
    """All else can be tested, and used, without a cluster or an endpoint."""
    users = {path.name for path in PACKAGE.glob("*.py") if package in imports_of(path)}
    assert users == MAY_IMPORT[package]


def modules_after(statement: str) -> set[str]:
    """The modules that are loaded after a statement, in a fresh Python."""
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import centerlines",
        "from centerlines import build_tile_jobs, s3_store, list_s3_files",
        "import centerlines.cli",
        "import centerlines.report, centerlines.display, centerlines.lines, centerlines.compare_command",
    ],
)
def test_ray_and_triton_are_loaded_only_where_they_are_needed(statement: str) -> None:
    """They take seconds to load, and `centerlines --help` needs neither."""
    loaded = modules_after(statement)
    assert "ray" not in loaded
    assert "tritonclient" not in loaded


def test_the_public_api_is_there() -> None:
    """Jobs of others import these names."""
    from centerlines import build_tile_jobs, list_s3_files, main, s3_store

    assert all(map(callable, (build_tile_jobs, list_s3_files, main, s3_store)))
    for name in centerlines.__all__:
        assert getattr(centerlines, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = centerlines.no_such_name


def test_the_package_ships_its_types_and_its_page() -> None:
    """An installation without them fails at the end of a run, or in the user's type checker."""
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "report.html").is_file()
