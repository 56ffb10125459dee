"""A real Triton that needs no GPU: the server and Python backend of the nvidia-pytriton wheel.

It has a virtual environment of its own, because its Python backend wants numpy below 2: with numpy 2 it answers with
the right shape and zero bytes, without an error.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from cache import build_once, cache_folder

REQUIREMENTS = Path(__file__).parents[2] / "files/triton-cpu/requirements.txt"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class TritonInstallation:
    """Where the server's parts are."""

    folder: Path

    @property
    def packages(self) -> Path:
        """The site-packages of the server's environment."""
        return self.folder / f"lib/python{PYTHON}/site-packages"

    @property
    def backends(self) -> Path:
        """What --backend-directory names."""
        return self.folder / "backends"

    @property
    def program(self) -> Path:
        """The tritonserver executable."""
        return self.packages / "pytriton/tritonserver/bin/tritonserver"

    def environment(self) -> dict[str, str]:
        """Return the environment variables for the server; the Python backend finds its Python by PATH."""
        libraries = [str(self.packages / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return clean | {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        }


def installation() -> TritonInstallation:
    """Return the installation that belongs to this Python and these requirements, present or not."""
    pins = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    return TritonInstallation(cache_folder() / f"triton-cpu-python{PYTHON}-{pins}")


def find() -> TritonInstallation:
    """Return the installation.

    Raises:
        FileNotFoundError: it is not there yet.
    """
    triton = installation()
    if not (triton.folder / ".complete").exists():
        raise FileNotFoundError(f"no Triton in {triton.folder}: run scripts/setup")
    return triton


def _build(folder: Path) -> None:
    triton = TritonInstallation(folder)
    venv.create(folder, with_pip=True, symlinks=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--requirement", str(REQUIREMENTS)], check=True)
    shipped = triton.packages / "pytriton/tritonserver"
    python_backend = triton.backends / "python"
    shutil.copytree(shipped / "backends/python", python_backend, ignore=shutil.ignore_patterns("__pycache__"))
    stub = python_backend / "triton_python_backend_stub"
    shutil.copy2(shipped / f"python_backend_stubs/{PYTHON}/triton_python_backend_stub", stub)
    for program in (triton.program, stub):
        program.chmod(0o755)
        linked = subprocess.run(["ldd", program], env=triton.environment(), capture_output=True, text=True, check=True)
        if missing := [line.split()[0] for line in linked.stdout.splitlines() if "not found" in line]:
            raise SystemExit(
                f"Triton needs {', '.join(missing)}; for libpython: apt-get install libpython{PYTHON}, then again"
            )


def main() -> None:
    """Install Triton into the cache, if it is not there."""
    triton = installation()
    build_once(triton.folder, _build)
    print(f"Triton for CPU: {triton.folder}")


if __name__ == "__main__":
    main()
