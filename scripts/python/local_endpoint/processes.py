"""Processes that end with their parent, and ports nobody else listens on."""

import contextlib
import ctypes
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies, so that none can be lost."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def start(command: list[str], *, env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a program with its output in `log`; it gets SIGTERM when this process dies.

    It has a session of its own: Ctrl-C in a terminal goes to this process alone, which stops the parts in order.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Nothing but one system call, so safe although other threads may hold locks.
            preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )


def stop(process: subprocess.Popen[bytes], *, within_s: float) -> None:
    """End one program: SIGTERM, and SIGKILL when that was not enough."""
    stop_all([process], within_s=within_s)


def stop_all(started: Iterable[subprocess.Popen[bytes]], *, within_s: float) -> None:
    """End several programs side by side, as `stop` does."""
    running = [process for process in started if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + within_s
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def stop_descendants(*, within_s: float) -> None:
    """End everything that this process and its children ever started and that is still there."""
    deadline = time.monotonic() + within_s
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                if time.monotonic() < deadline:
                    process.terminate()
                else:
                    process.kill()
        psutil.wait_procs(descendants, timeout=1)


def free_port() -> int:
    """Return a free TCP port, as `free_port_range` does."""
    return free_port_range(1)


def free_port_range(size: int) -> int:
    """Return the first of `size` neighbouring free TCP ports.

    They lie below the ones that the system gives to outgoing connections: one of those may be taken by a connection of
    whatever program before the server listens on it, which can be many seconds later.
    """
    for _ in range(100):
        first = random.randrange(10_000, 30_000 - size)  # noqa: S311  no secret
        if all(is_free(port) for port in range(first, first + size)):
            return first
    raise OSError(f"no {size} neighbouring free ports between 10000 and 30000")


def is_free(port: int) -> bool:
    """Tell whether a program could listen on the TCP port, on every address."""
    with socket.socket() as probe:
        # Connections that a stopped server has closed keep its port for a minute, but not from the next server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104  a port taken on any address is taken
        except OSError:
            return False
        return True


def log_tail(log: Path, *, lines: int = 15, only: Iterable[str] = ()) -> str:
    """Return the end of a log, of the lines that hold one of `only` where there are any."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    chosen = [line for line in text if any(word in line for word in only)] or text
    return "\n".join(f"    {line}" for line in chosen[-lines:])


def is_alive(pid: int) -> bool:
    """Tell whether the process is there and is not a zombie; the pid 0 is no process."""
    if pid == 0:
        return False
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def find_descendant(name: str) -> int:
    """Return the pid of a program of this name below this process; 0 if there is none."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == name and process.status() != psutil.STATUS_ZOMBIE:
                return process.pid
    return 0
