"""When to try again, on a clock that only moves when told to."""

import itertools
from collections.abc import Iterator

import pytest

from centerlines.backoff import Backoff


class Clock:
    """A time that passes when somebody waits."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time in seconds."""
        return self.now


def highest(low: float, high: float) -> float:
    """The jitter that waits longest."""
    assert low <= high
    return high


def lowest(low: float, high: float) -> float:
    """The jitter that waits shortest."""
    assert low <= high
    return low


def waited(clock: Clock, waits: Iterator[float]) -> list[float]:
    """Wait every wait out; return them."""
    seconds = []
    for wait in waits:
        seconds.append(wait)
        clock.now += wait
    return seconds


def test_waits_double_up_to_the_longest() -> None:
    """A server that is down for minutes must not be asked many times a second, nor be forgotten for hours."""
    clock = Clock()
    waits = Backoff(1000, first_s=0.25, longest_s=10).waits(clock=clock, jitter=highest)
    assert list(itertools.islice(waits, 9)) == [0.25, 0.5, 1, 2, 4, 8, 10, 10, 10]


def test_jitter_keeps_half_of_each_wait() -> None:
    """Clients that failed together must not come back together, nor at once."""
    waits = Backoff(1000, first_s=0.25, longest_s=10).waits(clock=Clock(), jitter=lowest)
    assert list(itertools.islice(waits, 8)) == [0.125, 0.25, 0.5, 1, 2, 4, 5, 5]


def test_real_jitter_spreads_between_the_bounds() -> None:
    """A constant would bring all clients back in the same moment."""
    firsts = [next(Backoff(1000, first_s=8).waits(clock=Clock())) for _ in range(200)]
    assert min(firsts) >= 4
    assert max(firsts) <= 8
    assert max(firsts) - min(firsts) > 2


@pytest.mark.parametrize("patience_s", [0.1, 1, 7, 120])
@pytest.mark.parametrize("jitter", [lowest, highest])
def test_the_last_try_begins_when_the_patience_ends(patience_s: float, jitter: object) -> None:
    """Who allows two minutes counts on two minutes, not on one and a half."""
    clock = Clock()
    waits = Backoff(patience_s).waits(clock=clock, jitter=jitter)  # type: ignore[arg-type]
    assert sum(waited(clock, waits)) == pytest.approx(patience_s)


@pytest.mark.parametrize("patience_s", [0, -1])
def test_without_patience_there_is_no_second_try(patience_s: float) -> None:
    """Zero is a setting: fail at once."""
    assert list(Backoff(patience_s).waits(clock=Clock())) == []


def test_time_spent_on_tries_counts() -> None:
    """A try that takes long uses the patience up as a wait does."""
    clock = Clock()
    waits = Backoff(60).waits(clock=clock, jitter=highest)
    next(waits)
    clock.now += 61
    assert list(waits) == []


def test_the_patience_begins_with_the_first_failure() -> None:
    """A request that ran for minutes before its server went away is worth a second try."""
    clock = Clock()
    waits = Backoff(10).waits(clock=clock, jitter=highest)
    clock.now += 300
    assert next(waits) == 0.25


def test_each_use_begins_anew() -> None:
    """One request's bad luck must not shorten the next one's patience."""
    clock = Clock()
    backoff = Backoff(3)
    assert waited(clock, backoff.waits(clock=clock, jitter=highest)) == waited(
        clock, backoff.waits(clock=clock, jitter=highest)
    )
