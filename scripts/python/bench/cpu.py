"""CPU seconds of the processes that take part, summed by what they are."""

import contextlib
from collections.abc import Iterable

import psutil

GROUPS = ("Triton", "HAProxy", "forwarder", "Serve proxy", "rest of Ray", "client")


def group_of(title: str) -> str:
    """Return the group of one of the endpoint's processes by the first word of its command line."""
    name = title.rpartition("/")[2]
    if name in {"tritonserver", "triton_python_backend_stub"}:
        return "Triton"
    if name == "haproxy":
        return "HAProxy"
    if title.startswith("ray::ServeReplica:") and ":Forwarder" in title:
        return "forwarder"
    if title.startswith("ray::ProxyActor"):
        return "Serve proxy"
    return "rest of Ray"


class CpuMeter:
    """Reads the CPU time of an endpoint's processes and of the clients."""

    def __init__(self, *, endpoint: psutil.Process, clients: Iterable[int]) -> None:
        self._endpoint = endpoint
        self._clients = [("client", psutil.Process(pid)) for pid in clients]
        self._processes: list[tuple[str, psutil.Process]] = []
        self._begun: list[float] = []

    def find_processes(self) -> None:
        """Look which processes there are; this takes CPU time itself, so do it before anything is measured."""
        children = self._endpoint.children(recursive=True)
        self._processes = [(group_of(_title(each)), each) for each in children] + self._clients

    def begin(self) -> None:
        """Count from now on."""
        self._begun = [_seconds(process) for _, process in self._processes]

    def seconds(self) -> dict[str, float]:
        """Return what each group has used since `begin`."""
        used = dict.fromkeys(GROUPS, 0.0)
        for (group, process), before in zip(self._processes, self._begun, strict=True):
            # One that has ended in between, as HAProxy's old process after a reload, counts as idle.
            used[group] += max(0.0, _seconds(process) - before)
        return used


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return (process.cmdline() or [""])[0]
    return ""


def _seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
