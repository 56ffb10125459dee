"""One measurement: callers at work, and a look at clocks and CPU times while they are."""

import time

from bench.client import ClientPool, Load
from bench.cpu import CpuMeter
from bench.figures import Figures, figures

# Between the warm-up and the window, for the word to reach the client processes.
_LEAD_S = 0.1


def measure(clients: ClientPool, load: Load, *, seconds: float, meter: CpuMeter | None = None) -> Figures:
    """Run a load, and measure `seconds` of it in which all callers are at work.

    Raises:
        BenchError: a call failed.
    """
    if meter:
        meter.find_processes()
    clients.start(load)
    begin = time.monotonic() + _LEAD_S
    end = begin + seconds
    clients.note(begin, end)
    _sleep_until(begin)
    if meter:
        meter.begin()
    _sleep_until(end)
    cpu_s = meter.seconds() if meter else {}
    return figures(clients.latencies(), seconds=seconds, cpu_s=cpu_s)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
