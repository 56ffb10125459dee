"""Starts the Triton of the endpoint: the real server, on CPU, for this machine only."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

import cpu_triton
from local_endpoint import processes

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Linux has it


def start(
    models: Iterable[Path],
    *,
    grpc_port: int,
    http_port: int,
    metrics_port: int,
    log: Path,
    host: str = "127.0.0.1",
    arguments: Iterable[str] = (),
) -> subprocess.Popen[bytes]:
    """Start tritonserver on model repositories, listening on `host`, with its output in `log`.

    Args:
        models: folders, each a model repository.
        grpc_port: of Triton, like the two that follow.
        http_port: as above.
        metrics_port: as above.
        log: file for what it prints.
        host: an address of the loopback interface.
        arguments: further ones of its command line.

    Raises:
        FileNotFoundError: Triton is not installed.
    """
    installation = cpu_triton.find()
    return processes.start(
        [
            str(installation.program),
            *(f"--model-repository={folder}" for folder in models),
            f"--backend-directory={installation.backends}",
            f"--http-address={host}",
            f"--http-port={http_port}",
            f"--grpc-address={host}",
            f"--grpc-port={grpc_port}",
            f"--metrics-address={host}",
            f"--metrics-port={metrics_port}",
            # Several may run on one machine; the Python backend's shared memory must not meet.
            f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix(host, grpc_port)}",
            *arguments,
        ],
        env=installation.environment(),
        log=log,
    )


def remove_shared_memory(*, grpc_port: int, host: str = "127.0.0.1") -> None:
    """Remove what a Triton that did not end by itself has left in memory; all its processes must be gone."""
    for region in SHARED_MEMORY.glob(f"{shared_memory_prefix(host, grpc_port)}*"):
        region.unlink(missing_ok=True)


def shared_memory_prefix(host: str, grpc_port: int) -> str:
    """Return what the names of the shared memory of the Triton at this address begin with."""
    return f"triton{host.rpartition('.')[2]}-{grpc_port}_"
