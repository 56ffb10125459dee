"""Shows a run: a live table in a terminal, a line every few seconds elsewhere."""

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from centerlines.progress import Summary

__all__ = ["Display", "LiveDisplay", "PlainDisplay", "display_for"]

LINE_PERIOD_S = 5.0


class Display(Protocol):
    """Something that shows how far a run is."""

    def show(self, summary: Summary) -> None:
        """Show the newest summary."""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Pace:
    """Rate and estimate, from the time since the first summary."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def line(self, summary: Summary) -> str:
        elapsed = time.monotonic() - self._start
        text = f"{summary.ended}/{summary.tiles} tiles  {_clock(elapsed)}"
        if summary.ended:
            rate = summary.ended / elapsed
            text += f"  {60 * rate:.1f} tiles/min  {summary.chips / elapsed:.0f} chips/s"
            if left := summary.tiles - summary.ended:
                text += f"  about {_clock(left / rate)} left"
        return text


class LiveDisplay:
    """A table that is drawn anew in its place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4)
        self._pace = _Pace()

    def __enter__(self) -> "LiveDisplay":
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, summary: Summary) -> None:
        """Draw the table."""
        table = Table(box=None, padding=(0, 2, 0, 0))
        for state in summary.states:
            table.add_column(state, justify="right", style="red" if state == "failed" else "")
        table.add_column("lines", justify="right")
        table.add_column("km", justify="right")
        table.add_row(*map(str, summary.states.values()), str(summary.lines), f"{summary.length_m / 1000:.2f}")
        parts: list[RenderableType] = [
            table,
            ProgressBar(total=max(summary.tiles, 1), completed=summary.ended, width=60),
            Text(self._pace.line(summary)),
        ]
        parts += [Text(f"{tile_id}: {reason}", style="red") for tile_id, reason in summary.failures]
        self._live.update(Group(*parts))


class PlainDisplay:
    """A line every few seconds, and one for each failed tile."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = _Pace()
        self._last = 0.0
        self._told = 0

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, summary: Summary) -> None:
        """Print what is new."""
        failed = summary.states["failed"]
        new = min(failed - self._told, len(summary.failures))
        for tile_id, reason in summary.failures[len(summary.failures) - new :]:
            self._console.print(f"failed: {tile_id}: {reason}", soft_wrap=True, highlight=False, markup=False)
        self._told = failed
        if time.monotonic() - self._last > LINE_PERIOD_S or summary.ended == summary.tiles:
            self._console.print(self._pace.line(summary), soft_wrap=True, highlight=False)
            self._last = time.monotonic()


def display_for(console: Console) -> LiveDisplay | PlainDisplay:
    """Choose the display that fits where the output goes."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
