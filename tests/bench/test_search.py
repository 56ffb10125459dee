"""The search for target_ongoing_requests on servers whose curve is known."""

from collections.abc import Callable

import pytest

from bench.errors import BenchError
from bench.figures import Figures
from bench.search import search


def _server(*, at_once: int, answer_ms: float) -> Callable[[int], Figures]:
    """A server that answers `at_once` requests side by side, each in `answer_ms`; the others wait for them."""

    def measure(callers: int) -> Figures:
        latency_ms = answer_ms * max(1, callers / at_once)
        return Figures(1000 * callers / latency_ms, {95: latency_ms}, {})

    return measure


def test_the_goal_bounds_the_target_while_throughput_still_grows() -> None:
    """Beyond it answers come too late."""
    calls: list[int] = []

    def measure(callers: int) -> Figures:
        # Batches: each caller more costs each answer 1 ms, and throughput grows all the way.
        calls.append(callers)
        return Figures(1000 * callers / (50 + callers), {95: 50.0 + callers}, {})

    found = search(measure, goal_ms=79, most=512)
    assert 26 <= found.goal_holds_up_to <= 29
    assert found.curve[found.goal_holds_up_to].latency_ms[95] <= 79
    assert found.exhausted_from is None
    assert found.target == found.goal_holds_up_to
    assert list(found.curve) == sorted(calls)
    assert len(calls) == len(set(calls))


def test_throughput_bounds_the_target_where_the_goal_is_loose() -> None:
    """A target of a queue: replicas would be added only when all of them have been full for long."""
    found = search(_server(at_once=8, answer_ms=10), goal_ms=100, most=512)
    assert 72 <= found.goal_holds_up_to <= 80
    assert found.exhausted_from == found.target == 8


def test_the_search_ends_with_the_most_that_are_tried() -> None:
    """A loose goal would go on to thousands of callers."""
    found = search(_server(at_once=1000, answer_ms=10), goal_ms=100, most=64)
    assert list(found.curve) == [1, 2, 4, 8, 16, 32, 64]
    assert found.target == 64


def test_the_limit_is_found_to_the_request_where_it_is_small() -> None:
    """With a target of 4 in place of 5, a fifth of the GPUs is bought for nothing."""
    assert search(_server(at_once=1, answer_ms=10), goal_ms=55, most=64).goal_holds_up_to == 5


def test_a_goal_that_one_request_breaks_has_no_target() -> None:
    """A target of 0 would be no answer."""
    with pytest.raises(BenchError, match=r"one request at a time already takes 10 ms \(p95\).* can keep 9 ms"):
        search(_server(at_once=8, answer_ms=10), goal_ms=9, most=64)
