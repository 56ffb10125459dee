"""What the options of scripts/bench mean."""

import argparse

import pytest

from bench.cases import (
    Case,
    Way,
    all_cases,
    all_ways,
    parse_count,
    parse_ingress,
    parse_list,
    parse_positive,
    parse_size,
    size_name,
)


@pytest.mark.parametrize(
    ("text", "size", "name"),
    [("16", 16, "16 B"), ("100k", 100_000, "100 KB"), ("1M", 1_000_000, "1 MB"), ("12.6m", 12_600_000, "12.6 MB")],
)
def test_a_size_is_what_it_is_called(text: str, size: int, name: str) -> None:
    """Otherwise the table would tell of another size than was sent."""
    assert parse_size(text) == size
    assert size_name(size) == name
    assert parse_size("2000m") == 2_000_000_000


@pytest.mark.parametrize("text", ["", "0", "-1", "k", "1.5", "0.1k5", "1g", "1km", "nan", "inf", "2001m"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """A typing error would be measured for half an hour."""
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a (size|whole number)"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "0", "1025", "1.5", "-1", "²", "eight"])
def test_what_is_no_number_of_callers_is_refused(text: str) -> None:
    """As above."""
    assert parse_list(parse_count)("1, 8,1024") == [1, 8, 1024]
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 1 to 1024"):
        parse_count(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "x"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """As above."""
    assert parse_positive("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number above 0"):
        parse_positive(text)


def test_lists_name_each_entry_once() -> None:
    """Rounds of one case would be counted as those of two."""
    assert parse_list(parse_ingress)("direct, python") == ["direct", "python"]
    with pytest.raises(argparse.ArgumentTypeError, match="twice"):
        parse_list(parse_size)("100k,100000")
    with pytest.raises(argparse.ArgumentTypeError, match="'haproxy' is none of direct, replica, python"):
        parse_list(parse_ingress)("direct,haproxy")


def test_the_direct_way_is_measured_once_whatever_the_number_of_forwarders() -> None:
    """It would be measured three times for the same figures: no request on it passes a forwarder."""
    ways = all_ways(["direct", "replica"], [1, 2, 4])
    assert ways == [Way("direct", 1), Way("replica", 1), Way("replica", 2), Way("replica", 4)]
    assert list(map(str, ways)) == ["direct", "replica", "replica, 2 forwarders", "replica, 4 forwarders"]


def test_streams_carry_the_smallest_size() -> None:
    """Streams are about messages, not bytes."""
    assert all_cases([1000, 16], [1, 8]) == [
        Case("ModelInfer", 1000, 1),
        Case("ModelInfer", 1000, 8),
        Case("ModelInfer", 16, 1),
        Case("ModelInfer", 16, 8),
        Case("ModelStreamInfer", 16, 1),
        Case("ModelStreamInfer", 16, 8),
    ]
    assert str(Case("ModelStreamInfer", 16, 1)) == "ModelStreamInfer, 16 B, 1 stream"
    assert str(Case("ModelInfer", 12_600_000, 8)) == "ModelInfer, 12.6 MB, 8 callers"
