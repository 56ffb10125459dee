"""Figures from latencies, against numpy's answers."""

import numpy as np
import pytest

from bench.errors import BenchError
from bench.figures import Figures, Ratio, Round, figures, latency_ratio, median_figures, percentile, rate_ratio


def _figures(rate: float, p99_ms: float = 1.0, cpu: float = 0.0) -> Figures:
    return Figures(rate, {99: p99_ms}, {"Triton": cpu})


@pytest.mark.parametrize("number", [1, 2, 3, 19, 20, 21, 99, 100, 101, 1000])
@pytest.mark.parametrize("percent", [1, 50, 95, 99, 100])
def test_percentiles_are_those_of_numpy(number: int, percent: int) -> None:
    """One place beside it, the slowest of a hundred would not show in p99."""
    values = np.sort(np.random.default_rng(number).random(number))
    assert percentile(list(values), percent) == np.percentile(values, percent, method="inverted_cdf")


def test_a_measurement_becomes_rates_milliseconds_and_cpu_for_a_thousand() -> None:
    """A table in other units than its head says would be wrong a thousandfold."""
    measured = figures([0.004, 0.001, 0.002, 0.003], seconds=2.0, cpu_s={"Triton": 0.02})
    assert measured == Figures(2.0, {50: 2.0, 95: 4.0, 99: 4.0}, {"Triton": 5.0})


def test_no_answer_in_time_says_what_to_do() -> None:
    """Large tensors and many callers can take longer than one measurement."""
    with pytest.raises(BenchError, match=r"not one request ended within 0.5 s; give more --seconds"):
        figures([], seconds=0.5, cpu_s={})


def test_ratios_are_taken_round_by_round() -> None:
    """A round in which the machine was slow would otherwise be compared with one in which it was fast."""
    rounds = [
        Round(triton=_figures(1000, 1), endpoint=_figures(900, 2)),
        Round(triton=_figures(100, 10), endpoint=_figures(80, 30)),
        Round(triton=_figures(500, 4), endpoint=_figures(500, 4)),
    ]
    assert rate_ratio(rounds) == Ratio(0.9, 0.8, 1.0)
    assert latency_ratio(rounds, 99) == Ratio(2.0, 1.0, 3.0)


def test_all_else_is_the_median_of_the_rounds() -> None:
    """One disturbed round must not show."""
    rounds = [_figures(10, 1, 7), _figures(30, 99, 5), _figures(20, 2, 6)]
    assert median_figures(rounds) == _figures(20, 2, 6)
