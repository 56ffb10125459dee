"""The progress table and what is written of it."""

import csv
import io
from dataclasses import replace

import pytest

from centerlines.progress import Outcome, ProgressTable, Row, progress_csv

A, B, C = ("job", "a"), ("job", "b"), ("other", "a")
DONE = Outcome("done", lines=3, length_m=12.3456, chips=9)
EMPTY = Outcome("empty", chips=4)


def failed(reason: str = "no CRS") -> Outcome:
    """The outcome of a tile that failed."""
    return Outcome("failed", reason)


def read(content: bytes) -> list[list[str]]:
    """What a program reads from the CSV."""
    return list(csv.reader(io.StringIO(content.decode(), newline="")))


def test_a_tile_goes_through_its_stages() -> None:
    """What the user sees of a tile must be where it is."""
    table = ProgressTable([A])
    assert table.rows() == [Row(A)]
    assert table.begin(A, now=100.0) == 1
    assert table.rows()[0].state == "waiting"
    table.move(A, "predicting")
    assert table.rows()[0].state == "predicting"
    table.move(A, "drawing")
    assert table.rows()[0].state == "drawing"
    assert table.open_keys() == [A]
    table.end(A, DONE, now=107.5)
    assert table.rows() == [Row(A, "done", attempts=1, seconds=7.5, outcome=DONE)]
    assert table.open_keys() == []


def test_a_second_attempt_starts_at_the_beginning_and_keeps_the_clock() -> None:
    """The seconds tell how long the tile took the user, failures included."""
    table = ProgressTable([A])
    table.begin(A, now=10)
    table.move(A, "drawing")
    assert table.begin(A, now=20) == 2
    assert table.rows()[0].state == "waiting"
    table.end(A, EMPTY, now=25)
    row = table.rows()[0]
    assert (row.attempts, row.seconds, row.state) == (2, 15, "empty")


def test_a_tile_that_never_began_can_fail() -> None:
    """When the endpoint is gone, tiles that still wait end too."""
    table = ProgressTable([A])
    table.end(A, failed(), now=50)
    row = table.rows()[0]
    assert (row.attempts, row.seconds, row.state) == (0, 0, "failed")


@pytest.mark.parametrize("outcome", [DONE, EMPTY, failed()])
def test_a_tile_ends_once(outcome: Outcome) -> None:
    """A late answer of an earlier attempt must not change what was told."""
    table = ProgressTable([A, B])
    table.begin(A, now=0)
    table.end(A, outcome, now=1)
    before = table.rows(), table.summary()
    with pytest.raises(ValueError, match=f"tile a has already ended as {outcome.state}"):
        table.end(A, DONE, now=2)
    with pytest.raises(ValueError, match="already ended"):
        table.begin(A, now=2)
    with pytest.raises(ValueError, match="already ended"):
        table.move(A, "drawing")
    assert (table.rows(), table.summary()) == before


def test_tiles_of_the_same_name_in_two_jobs_are_two() -> None:
    """The key is (job_id, tile_id)."""
    table = ProgressTable([A, C])
    table.end(A, DONE, now=0)
    assert table.open_keys() == [C]


def test_the_summary_adds_up_what_has_ended() -> None:
    """The live table is made of it."""
    table = ProgressTable([A, B, C, ("job", "d")])
    table.begin(A, now=0)
    table.begin(B, now=0)
    table.move(B, "loading")
    table.end(A, DONE, now=1)
    table.end(C, replace(DONE, length_m=10), now=1)
    summary = table.summary()
    assert list(summary.states) == ["waiting", "loading", "predicting", "drawing", "done", "empty", "failed"]
    assert summary.states["waiting"] == summary.states["loading"] == 1
    assert summary.states["done"] == 2
    assert (summary.tiles, summary.ended) == (4, 2)
    assert (summary.chips, summary.lines) == (18, 6)
    assert summary.length_m == pytest.approx(22.3456)
    assert summary.failures == ()


def test_the_summary_has_every_failure_in_order() -> None:
    """A display that looks now and then must not miss a tile, however many fail in between."""
    keys = [("job", str(number)) for number in range(100)]
    table = ProgressTable(keys)
    for key in reversed(keys):
        table.end(key, failed(f"reason {key[1]}"), now=0)
    assert table.summary().failures == tuple((str(n), f"reason {n}") for n in reversed(range(100)))


def test_an_empty_table_has_a_summary() -> None:
    """A run of no tiles is no error."""
    summary = ProgressTable([]).summary()
    assert (summary.tiles, summary.ended, summary.failures) == (0, 0, ())


def test_the_csv_has_the_agreed_columns_and_only_tiles_that_have_ended() -> None:
    """Programs of others read this file, also while the run goes on."""
    table = ProgressTable([A, B, C])
    table.begin(A, now=0)
    table.begin(B, now=0)
    table.end(C, EMPTY, now=9)
    table.end(A, DONE, now=1.23456)
    content = progress_csv(table.rows())
    assert content.startswith(b"job_id,tile_id,state,reason,attempts,seconds,lines,length_m\n")
    assert read(content)[1:] == [
        ["job", "a", "done", "", "1", "1.235", "3", "12.346"],
        ["other", "a", "empty", "", "0", "0.000", "0", "0.000"],
    ]


def test_the_csv_of_nothing_is_its_header() -> None:
    """The file is there, and valid, from the beginning."""
    assert progress_csv([]) == b"job_id,tile_id,state,reason,attempts,seconds,lines,length_m\n"


@pytest.mark.parametrize("reason", ["a, b", 'say "no"', "two\nlines", "; ' \t é 漢", " spaces ", '","', "#"])
def test_any_reason_survives_the_csv(reason: str) -> None:
    """Reasons quote file names and messages of servers."""
    content = progress_csv([Row(A, "failed", attempts=3, outcome=failed(reason))])
    assert read(content)[1] == ["job", "a", "failed", reason, "3", "0.000", "0", "0.000"]


def test_bytes_that_are_no_text_do_not_stop_the_csv() -> None:
    """A file name in another encoding, quoted in a reason, must not cost the whole table."""
    content = progress_csv([Row(A, "failed", outcome=failed("tile \udce9.tif"))])
    assert read(content)[1][3] == "tile \\udce9.tif"
