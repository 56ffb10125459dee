"""Starts the Triton of the endpoint: the real server, on CPU, for this machine only."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

import cpu_triton
from local_endpoint import processes

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Linux has it


def start(
    models: Iterable[Path], *, grpc_port: int, http_port: int, metrics_port: int, log: Path
) -> subprocess.Popen[bytes]:
    """Start tritonserver on model repositories, listening on 127.0.0.1, with its output in `log`.

    Raises:
        FileNotFoundError: Triton is not installed.
    """
    installation = cpu_triton.find()
    return processes.start(
        [
            str(installation.program),
            *(f"--model-repository={folder}" for folder in models),
            f"--backend-directory={installation.backends}",
            "--http-address=127.0.0.1",
            f"--http-port={http_port}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={grpc_port}",
            "--metrics-address=127.0.0.1",
            f"--metrics-port={metrics_port}",
            # Several may run on one machine; the Python backend's shared memory must not meet.
            f"--backend-config=python,shm-region-prefix-name={_shared_memory_prefix(grpc_port)}",
        ],
        env=installation.environment(),
        log=log,
    )


def remove_shared_memory(*, grpc_port: int) -> None:
    """Remove what a Triton that did not end by itself has left in memory; all its processes must be gone."""
    for region in SHARED_MEMORY.glob(f"{_shared_memory_prefix(grpc_port)}*"):
        region.unlink(missing_ok=True)


def _shared_memory_prefix(grpc_port: int) -> str:
    return f"triton{grpc_port}_"
