"""The table and the plot from figures that are known."""

import re
from datetime import date
from pathlib import Path

import pytest
from rich.console import Console

from bench.cases import Case, Way, all_cases
from bench.cpu import GROUPS
from bench.figures import Figures, Round
from bench.machine import Machine
from bench.plot import write_plot
from bench.report import Run, markdown, number, terminal_table

RUN = Run(
    command="scripts/bench --rounds 2",
    day=date(2026, 12, 1),
    machine=Machine(cores=2, cpu="A CPU", memory_bytes=24 * 2**30, versions={"Ray": "2.60.0", "Triton": "2.51.0"}),
    rounds=2,
    seconds=3.0,
    client_processes=2,
)


def _figures(rate: float) -> Figures:
    cpu = dict.fromkeys(GROUPS, 0.0) | {"Triton": 0.25, "client": 0.125}
    return Figures(rate, {50: 1000 / rate, 95: 2000 / rate, 99: 4000 / rate}, cpu)


def _results(cases: list[Case]) -> dict[Way, dict[Case, list[Round]]]:
    share = {Way("direct", 1): 0.9, Way("replica", 2): 0.25}
    return {
        way: {case: [Round(_figures(rate), _figures(rate * part)) for rate in (2000, 4000)] for case in cases}
        for way, part in share.items()
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0004, "0"),
        (0.0126, "0.013"),
        (0.9994, "0.999"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (12345.6, "12,346"),
    ],
)
def test_numbers_show_what_means_something(value: float, text: str) -> None:
    """2,820.3333 answers a second would pretend to a precision that no round has."""
    assert number(value) == text


def test_the_page_says_what_was_measured_how_and_where() -> None:
    """Figures without machine, versions and command cannot be made again."""
    page = markdown(RUN, _results(all_cases([16, 1_000_000], [1, 8])), plot="benchmarks.svg")
    for part in ("2026-12-01", "    scripts/bench --rounds 2\n", "A CPU, 2 cores, 24 GiB", "Ray 2.60.0, Triton 2.51.0"):
        assert part in page
    assert "](benchmarks.svg)" in page
    assert re.findall("^## (.*)", page, re.MULTILINE) == [
        "ModelInfer, 16 B",
        "ModelInfer, 1 MB",
        "ModelStreamInfer, 16 B",
    ]
    assert "| 8 | Triton | 3,000 |  | 0.375 | 0.750 | 1.50 |  |" in page
    assert "| 8 | direct | 2,700 | 0.90 (0.90-0.90) | 0.417 | 0.833 | 1.67 | 1.11 (1.11-1.11) |" in page
    assert "| 8 | replica, 2 forwarders | 750 | 0.25 (0.25-0.25) |" in page
    assert "| 8 | direct | 0.250 | 0 | 0 | 0 | 0 | 0.125 | 0.375 |" in page


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    """Markdown drops the cells beyond, and shifts nothing into those that lack."""
    page = markdown(RUN, _results(all_cases([16], [1, 8])), plot="benchmarks.svg")
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({row.count("|") for row in table.splitlines()}) == 1


def test_the_terminal_shows_a_way_whole_in_80_columns() -> None:
    """It is all that is seen before the last way has been measured."""
    console = Console(width=80)
    results = _results([Case("ModelStreamInfer", 12_600_000, 64)])
    with console.capture() as capture:
        console.print(terminal_table(results, Way("direct", 1)))
    title, _, row = capture.get().splitlines()
    assert title.strip() == "direct beside Triton"
    assert " ".join(row.split()) == "ModelStreamInfer 12.6 MB x 64 3,000 2,700 0.90 (0.90-0.90) 1.11"


def test_the_plot_names_every_way_and_group_and_is_the_same_for_the_same_figures(tmp_path: Path) -> None:
    """A new file with the old figures would look like a new measurement in the history."""
    results = _results(all_cases([16], [1, 8, 64]))
    for name in ("first.svg", "second.svg"):
        write_plot(results, tmp_path / name)
    plot = (tmp_path / "first.svg").read_text()
    assert plot == (tmp_path / "second.svg").read_text()
    for label in ("Triton itself", "direct", "replica, 2 forwarders", "ModelInfer, 16 B", "p99 latency, ms", *GROUPS):
        assert f">{label}</text>" in plot
