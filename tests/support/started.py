"""Finds, and ends, every process that a program of a test has started, however deep and whoever its parent is now."""

import os
import subprocess
import time
import uuid

import psutil

_VARIABLE = "TRITON_ON_RAY_TEST"


class Started:
    """The processes that descend from one program.

    They inherit a variable of its environment. Some of Ray's overwrite their environment with their title; those share
    a session with one that does not, so the sessions seen are kept.
    """

    def __init__(self) -> None:
        self._value = uuid.uuid4().hex
        self._sessions: set[int] = set()

    @property
    def environment(self) -> dict[str, str]:
        """The variable to start the program with."""
        return {_VARIABLE: self._value}

    def processes(self) -> list[psutil.Process]:
        """Return those that live, zombies left out."""
        marked, others = [], []
        for process in psutil.process_iter():
            try:
                session = os.getsid(process.pid)
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.environ().get(_VARIABLE) == self._value:
                    self._sessions.add(session)
                    marked.append(process)
                else:
                    others.append((process, session))
            except (ProcessLookupError, psutil.Error):
                continue
        return marked + [process for process, session in others if session in self._sessions]

    def wait_for_none(self, *, within_s: float) -> list[psutil.Process]:
        """Wait until no process lives; return those that still do when the time is over."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def kill(self) -> None:
        """End all of them at once."""
        while left := self.processes():
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(left, timeout=1)


def describe(processes: list[psutil.Process]) -> str:
    """Return one line for each process."""
    lines = []
    for process in processes:
        try:
            lines.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        except psutil.NoSuchProcess:
            continue
    return "\n".join(lines)


def wait_for_exit(process: subprocess.Popen[bytes], *, within_s: float, what: str) -> int:
    """Return the exit code.

    Raises:
        AssertionError: it did not exit in time.
    """
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{what} did not exit within {within_s:g} s") from None
