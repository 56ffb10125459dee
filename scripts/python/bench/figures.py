"""From latencies to the figures of a table."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.errors import BenchError

PERCENTS = (50, 95, 99)


@dataclass(frozen=True)
class Figures:
    """One measurement, or the medians of several."""

    rate: float
    """Answers per second."""
    latency_ms: Mapping[int, float]
    """Percentile -> latency."""
    cpu_s: Mapping[str, float]
    """Process group -> CPU seconds per thousand answers."""


@dataclass(frozen=True)
class Round:
    """Two measurements of one load, one right after the other."""

    triton: Figures
    endpoint: Figures


@dataclass(frozen=True)
class Ratio:
    """How many times Triton's figure the endpoint's is, over the rounds."""

    median: float
    low: float
    high: float


def figures(latencies: Sequence[float], *, seconds: float, cpu_s: Mapping[str, float]) -> Figures:
    """Return the figures of one measurement.

    Args:
        latencies: of each answer, in seconds.
        seconds: that the measurement took.
        cpu_s: CPU seconds in that time.

    Raises:
        BenchError: there was no answer.
    """
    if not latencies:
        raise BenchError(f"not one request ended within {seconds:g} s; give more --seconds")
    ordered = sorted(latencies)
    return Figures(
        rate=len(ordered) / seconds,
        latency_ms={percent: 1000 * percentile(ordered, percent) for percent in PERCENTS},
        cpu_s={group: 1000 * used / len(ordered) for group, used in cpu_s.items()},
    )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest value of an ascending sequence that `percent` in a hundred do not exceed (nearest rank)."""
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(rank, 1) - 1]


def median_figures(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    return Figures(
        rate=statistics.median(each.rate for each in rounds),
        latency_ms={key: statistics.median(each.latency_ms[key] for each in rounds) for key in rounds[0].latency_ms},
        cpu_s={key: statistics.median(each.cpu_s[key] for each in rounds) for key in rounds[0].cpu_s},
    )


def rate_ratio(rounds: Sequence[Round]) -> Ratio:
    """Return the endpoint's rate in terms of Triton's, taken in each round by itself."""
    return _ratio([each.endpoint.rate / each.triton.rate for each in rounds])


def latency_ratio(rounds: Sequence[Round], percent: int) -> Ratio:
    """Return a percentile of the endpoint's latency in terms of Triton's, taken in each round by itself."""
    return _ratio([each.endpoint.latency_ms[percent] / each.triton.latency_ms[percent] for each in rounds])


def _ratio(ratios: Sequence[float]) -> Ratio:
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))
