"""What a person sees of a run, on a recorded terminal."""

import io
import re
import time
from collections.abc import Sequence

import pytest
from rich.console import Console

from centerlines.display import LiveDisplay, PlainDisplay, display_for
from centerlines.progress import Outcome, ProgressTable, Summary

LONG_REASON = "has no coordinate reference system (CRS); give it one, for example with gdal_edit.py -a_srs EPSG:3424"


class Clock:
    """A time that passes when told to."""

    now = 100.0

    def __call__(self) -> float:
        """The time in seconds."""
        return self.now


def summary(*, tiles: int, done: int = 0, failed: Sequence[str] = (), reason: str = LONG_REASON) -> Summary:
    """A summary of so many tiles, of which these have ended."""
    table = ProgressTable(
        [*(("job", f"t{number}") for number in range(tiles - len(failed))), *(("job", n) for n in failed)]
    )
    for number in range(done):
        table.end(("job", f"t{number}"), Outcome("done", lines=2, length_m=500, chips=10), now=0)
    for name in failed:
        table.end(("job", name), Outcome("failed", reason), now=0)
    return table.summary()


def recorded(*, width: int = 80, terminal: bool = False) -> tuple[Console, io.StringIO]:
    """A console, and what is written to it."""
    output = io.StringIO()
    return Console(file=output, width=width, height=25, force_terminal=terminal, _environ={"TERM": "xterm"}), output


def test_a_line_is_printed_every_few_seconds_and_at_the_end() -> None:
    """A log must show that the run goes on, without being all progress."""
    console, output = recorded()
    clock = Clock()
    with PlainDisplay(console, clock=clock) as display:
        for second in range(13):
            clock.now = 100 + second
            display.show(summary(tiles=20, done=second))
        clock.now = 120
        display.show(summary(tiles=20, done=20))
        clock.now = 120.1
        display.show(summary(tiles=20, done=20))
    assert output.getvalue().splitlines() == [
        "5/20 tiles  0:05  60.0 tiles/min  10 chips/s  about 0:15 left",
        "10/20 tiles  0:10  60.0 tiles/min  10 chips/s  about 0:10 left",
        "20/20 tiles  0:20  60.0 tiles/min  10 chips/s",
    ]


def test_before_the_first_tile_has_ended_there_is_no_estimate() -> None:
    """A made-up number is worse than none; and nothing may be divided by zero."""
    console, output = recorded()
    clock = Clock()
    display = PlainDisplay(console, clock=clock)
    display.show(summary(tiles=2, done=2))
    clock.now += 3700
    display.show(summary(tiles=3))
    assert output.getvalue().splitlines() == ["2/2 tiles  0:00", "0/3 tiles  1:01:40"]


@pytest.mark.parametrize("between", [1, 3, 5, 6, 100])
def test_each_failed_tile_is_told_once_however_many_fail_between_two_looks(between: int) -> None:
    """A tile that is not told of is looked for in vain; when the endpoint goes, all that are left fail at once."""
    names = [f"tile_{number}" for number in range(300)]
    console, output = recorded()
    display = PlainDisplay(console)
    for count in (*range(0, 300, between), 300, 300):
        display.show(summary(tiles=400, failed=names[:count], reason="x"))
    assert output.getvalue().splitlines() == [f"failed: {name}: x" for name in names]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_reason_is_neither_wrapped_nor_taken_for_markup(terminal: bool) -> None:
    """Reasons quote shapes in brackets; and a line that is one line can be searched for."""
    console, output = recorded(terminal=terminal)
    reason = f"[3, 256, 256] [/red] [bold]{LONG_REASON} {LONG_REASON}"
    display = LiveDisplay(console) if terminal else PlainDisplay(console)
    with display:
        display.show(summary(tiles=2, failed=["a"], reason=reason))
    assert f"failed: a: {reason}" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())


def screen(console: Console, output: io.StringIO) -> list[str]:
    """The lines of the last picture that the live display drew, without colours."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue().rpartition("\r")[2])
    assert all(len(line) <= console.width for line in plain.splitlines())
    return [line.rstrip() for line in plain.splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_table_fits_the_terminal(width: int) -> None:
    """Ten thousand tiles and a thousand kilometres still fit into 80 columns."""
    console, output = recorded(width=width, terminal=True)
    table = ProgressTable([("job", str(number)) for number in range(40_000)])
    for number in range(30_000):
        table.end(("job", str(number)), Outcome("done", lines=40, length_m=2345, chips=81), now=0)
    with LiveDisplay(console) as display:
        display.show(table.summary())
    header, row, _bar, pace = screen(console, output)[:4]
    states = ["waiting", "loading", "predicting", "drawing", "done", "empty", "failed", "lines", "km"]
    assert header.split() == states
    assert row.split() == ["10000", "0", "0", "0", "30000", "0", "0", "1200000", "70350.00"]
    assert pace.startswith("30000/40000 tiles  0:00")


def test_the_live_display_tells_failures_above_the_table_and_once() -> None:
    """The table keeps its height, so nothing jumps; what was told stays on the screen afterwards."""
    console, output = recorded(terminal=True)
    with LiveDisplay(console) as display:
        display.show(summary(tiles=9, failed=["a", "b"]))
        display.show(summary(tiles=9, failed=["a", "b", "c"]))
    text = output.getvalue()
    assert [text.count(f"failed: {name}: {LONG_REASON}") for name in "abc"] == [1, 1, 1]
    assert len(screen(console, output)) == 4


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_cursor_comes_back(error: type[BaseException] | None) -> None:
    """A terminal without a cursor is what an interrupted program is remembered by."""
    console, output = recorded(terminal=True)

    def run() -> None:
        with LiveDisplay(console) as display:
            display.show(summary(tiles=2))
            if error:
                raise error

    if error:
        with pytest.raises(error):
            run()
    else:
        run()
    hidden, shown = output.getvalue().rfind("\x1b[?25l"), output.getvalue().rfind("\x1b[?25h")
    assert 0 <= hidden < shown


def test_the_display_fits_where_the_output_goes() -> None:
    """Control characters do not belong into a log file, nor to a terminal that cannot move its cursor."""
    assert isinstance(display_for(recorded(terminal=True)[0]), LiveDisplay)
    assert isinstance(display_for(recorded()[0]), PlainDisplay)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(display_for(dumb), PlainDisplay)


def test_a_thousand_looks_at_ten_thousand_failures_are_quick() -> None:
    """The display must not be what the run waits for."""
    console, _ = recorded()
    display = PlainDisplay(console)
    many = summary(tiles=10_000, failed=[str(number) for number in range(10_000)])
    display.show(many)
    started = time.process_time()
    for _ in range(1000):
        display.show(many)
    assert time.process_time() - started < 5
