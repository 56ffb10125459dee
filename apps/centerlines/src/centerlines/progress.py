"""How far a run is: one row a tile, and what follows from the rows."""

import csv
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from centerlines.jobs import TileKey

__all__ = ["FINAL_STATES", "Outcome", "ProgressTable", "Row", "State", "Summary"]

State = Literal["waiting", "loading", "predicting", "drawing", "done", "empty", "failed"]
FINAL_STATES: tuple[Literal["done", "empty", "failed"], ...] = ("done", "empty", "failed")
CSV_HEADER = ("job_id", "tile_id", "state", "reason", "attempts", "seconds", "lines", "length_m")


@dataclass(frozen=True)
class Outcome:
    """What became of a tile."""

    state: Literal["done", "empty", "failed"]
    """done: lines were written; empty: there are none; failed: see the reason."""
    reason: str = ""
    """Why it failed; one line."""
    lines: int = 0
    """How many lines were written."""
    length_m: float = 0.0
    """Their length in metres."""
    chips: int = 0
    """How many chips the model saw."""
    disagreement: float = 0.0
    """How much neighbouring chips differ, 0-1; see `stitch.Stitched`."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of work by stage."""


@dataclass(frozen=True)
class Row:
    """One tile of the progress table."""

    key: TileKey
    """(job_id, tile_id)."""
    state: State = "waiting"
    """Where the tile is."""
    attempts: int = 0
    """How often it was begun."""
    seconds: float = 0.0
    """Wall-clock time from its first beginning to its end."""
    outcome: Outcome | None = None
    """What became of it; None until it has ended."""

    def csv_fields(self) -> tuple[str, ...]:
        """Return the row's fields in the order of CSV_HEADER."""
        outcome = self.outcome
        result = (outcome.reason, outcome.lines, outcome.length_m) if outcome else ("", 0, 0.0)
        reason, lines, length_m = result
        return (
            *self.key,
            self.state,
            reason,
            str(self.attempts),
            f"{self.seconds:.3f}",
            str(lines),
            f"{length_m:.3f}",
        )


@dataclass(frozen=True)
class Summary:
    """The table in a few numbers, and what failed."""

    states: dict[str, int]
    """How many tiles are in each state."""
    chips: int
    """Chips of the tiles that have ended."""
    lines: int
    """Lines of the tiles that have ended."""
    length_m: float
    """Their length in metres."""
    failures: tuple[tuple[str, str], ...]
    """(tile_id, reason) of the tiles that failed, in the order in which they did."""

    @property
    def tiles(self) -> int:
        """All tiles of the run."""
        return sum(self.states.values())

    @property
    def ended(self) -> int:
        """Tiles in a final state."""
        return sum(self.states[state] for state in FINAL_STATES)


class ProgressTable:
    """The rows of a run. Times are passed in, in seconds of one clock."""

    def __init__(self, keys: Iterable[TileKey]) -> None:
        self._rows = {key: Row(key) for key in keys}
        self._begun: dict[TileKey, float] = {}
        self._failures: list[tuple[str, str]] = []

    def begin(self, key: TileKey, *, now: float) -> int:
        """Begin an attempt at a tile; return its number, from 1."""
        self._begun.setdefault(key, now)
        row = self._open_row(key)
        self._rows[key] = replace(row, state="waiting", attempts=row.attempts + 1)
        return row.attempts + 1

    def move(self, key: TileKey, state: Literal["loading", "predicting", "drawing"]) -> None:
        """Note that a tile has come to a later stage."""
        self._rows[key] = replace(self._open_row(key), state=state)

    def end(self, key: TileKey, outcome: Outcome, *, now: float) -> None:
        """Note what became of a tile; once only."""
        seconds = now - self._begun.get(key, now)
        self._rows[key] = replace(self._open_row(key), state=outcome.state, seconds=seconds, outcome=outcome)
        if outcome.state == "failed":
            self._failures.append((key[1], outcome.reason))

    def _open_row(self, key: TileKey) -> Row:
        row = self._rows[key]
        if row.outcome is not None:
            raise ValueError(f"tile {key[1]} has already ended as {row.state}")
        return row

    def open_keys(self) -> list[TileKey]:
        """Return the tiles that have not ended."""
        return [key for key, row in self._rows.items() if row.outcome is None]

    def rows(self) -> list[Row]:
        """Return all rows, in the order of the run."""
        return list(self._rows.values())

    def summary(self) -> Summary:
        """Count the rows."""
        states = Counter(row.state for row in self._rows.values())
        outcomes = [row.outcome for row in self._rows.values() if row.outcome]
        return Summary(
            states={state: states[state] for state in get_args(State)},
            chips=sum(outcome.chips for outcome in outcomes),
            lines=sum(outcome.lines for outcome in outcomes),
            length_m=sum(outcome.length_m for outcome in outcomes),
            failures=tuple(self._failures),
        )


def progress_csv(rows: Iterable[Row]) -> bytes:
    """Write the rows of the tiles that have ended as progress.csv."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    writer.writerows(row.csv_fields() for row in rows if row.outcome)
    # A reason may hold bytes of a file name that are no text.
    return text.getvalue().encode(errors="backslashreplace")
