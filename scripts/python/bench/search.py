"""Finds the number of requests at once up to which a latency goal holds, and the one beyond which they only wait."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.errors import BenchError
from bench.figures import Figures

# The share of the best throughput with which it counts as exhausted, if twice as many callers bring no more.
ENOUGH = 0.9


@dataclass(frozen=True)
class Found:
    """The curve that was measured, and what follows from it."""

    curve: dict[int, Figures]
    """Callers -> figures, ascending."""
    goal_holds_up_to: int
    exhausted_from: int | None
    """The least number that has ENOUGH of the best throughput within the goal; None where it grows all the way."""

    @property
    def target(self) -> int:
        """The value for target_ongoing_requests: more than this would either break the goal or only queue."""
        return self.exhausted_from or self.goal_holds_up_to


def search(measure: Callable[[int], Figures], *, goal_ms: float, most: int) -> Found:
    """Double the callers until the 95th percentile breaks the goal, then halve the interval to a tenth.

    Raises:
        BenchError: one caller alone waits longer than the goal.
    """
    curve: dict[int, Figures] = {}

    def holds(callers: int) -> bool:
        curve[callers] = measure(callers)
        return curve[callers].latency_ms[95] <= goal_ms

    good, bad = 0, 1
    while holds(bad):
        good, bad = bad, bad * 2
        if bad > most:
            break
    else:
        while bad - good > max(1, good // 10):
            middle = (good + bad) // 2
            good, bad = (middle, bad) if holds(middle) else (good, middle)
    if not good:
        raise BenchError(
            f"one request at a time already takes {curve[1].latency_ms[95]:.3g} ms (p95): "
            f"no target_ongoing_requests can keep {goal_ms:g} ms"
        )
    best = max(figures.rate for callers, figures in curve.items() if callers <= good)
    exhausted = [callers for callers, figures in curve.items() if callers <= good / 2 and figures.rate >= ENOUGH * best]
    return Found(dict(sorted(curve.items())), goal_holds_up_to=good, exhausted_from=min(exhausted, default=None))
