"""Shows a run: a live table in a terminal, a line every few seconds elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from centerlines.progress import Summary

__all__ = ["Display", "LiveDisplay", "PlainDisplay", "display_for"]

LINE_PERIOD_S = 5.0
BAR_WIDTH = 60
# How much of a tile's way lies behind it, for the estimate.
SHARE_DONE = {"loading": 0.2, "predicting": 0.5, "drawing": 0.8}


class Display(Protocol):
    """Something that shows how far a run is."""

    def show(self, summary: Summary) -> None:
        """Show the newest summary."""


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Pace:
    """Rate and estimate, from the time since work began."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = self._idle_until = clock()

    def line(self, summary: Summary) -> str:
        now = self._clock()
        if summary.states["waiting"] == summary.tiles:
            self._idle_until = now
        text = f"{summary.ended}/{summary.tiles} tiles  {_minutes(now - self._start)}"
        working = now - self._idle_until
        if summary.ended and working > 0:
            text += f"  {60 * summary.ended / working:.1f} tiles/min  {summary.chips / working:.0f} chips/s"
            # Tiles under way count in part: those that began together end together, and not at the pace of the first.
            done = summary.ended + sum(share * summary.states[state] for state, share in SHARE_DONE.items())
            if summary.ended < summary.tiles:
                text += f"  about {_minutes(working * (summary.tiles / done - 1))} left"
        return text


class _Failures:
    """Tells of each failed tile once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told = 0

    def tell(self, summary: Summary) -> None:
        for tile_id, reason in summary.failures[self._told :]:
            line = Text(f"failed: {tile_id}: {reason}", style="red")
            self._console.print(line, soft_wrap=True)
        self._told = len(summary.failures)


class LiveDisplay:
    """A table that is drawn anew in its place; failed tiles are told of above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(Text("starting"), console=console, refresh_per_second=4)
        self._pace = _Pace()
        self._failures = _Failures(console)

    def __enter__(self) -> "LiveDisplay":
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, summary: Summary) -> None:
        """Draw the table."""
        self._failures.tell(summary)
        table = Table(box=None, padding=(0, 2, 0, 0))
        for state, count in summary.states.items():
            table.add_column(state, justify="right", style="red" if state == "failed" and count else "")
        table.add_column("lines", justify="right")
        table.add_column("km", justify="right")
        table.add_row(*map(str, summary.states.values()), str(summary.lines), f"{summary.length_m / 1000:.2f}")
        # A bar does not end its line; the padding, of nothing, does.
        bar = Padding(ProgressBar(total=max(summary.tiles, 1), completed=summary.ended, width=BAR_WIDTH), expand=False)
        pace = Text(self._pace.line(summary), no_wrap=True, overflow="ellipsis")
        self._live.update(Group(table, bar, pace))


class PlainDisplay:
    """A line every few seconds, and one for each failed tile."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._pace = _Pace(clock)
        self._failures = _Failures(console)
        self._last = clock()
        self._ended = False

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, summary: Summary) -> None:
        """Print what is new."""
        self._failures.tell(summary)
        now = self._clock()
        ended = summary.ended == summary.tiles
        if now - self._last >= LINE_PERIOD_S or (ended and not self._ended):
            self._console.print(self._pace.line(summary), soft_wrap=True, highlight=False)
            self._last = now
            self._ended = ended


def display_for(console: Console) -> LiveDisplay | PlainDisplay:
    """Choose the display that fits where the output goes."""
    animated = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(console) if animated else PlainDisplay(console)
