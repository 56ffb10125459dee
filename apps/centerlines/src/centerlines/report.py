"""The record of a run, and a page about it."""

import base64
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from centerlines.jobs import TileKey
from centerlines.progress import FINAL_STATES, Row

__all__ = ["RunRecord", "render_report"]

STAGES = {
    "load": "read and cut",
    "predict": "predict",
    "blend": "blend and threshold",
    "draw": "draw lines",
    "write": "write",
}


@dataclass(frozen=True)
class RunRecord:
    """What run.json and report.html tell of a run."""

    run_id: str
    """Name of the run."""
    version: str
    """Version of this package."""
    started: str
    """When it began; ISO 8601, UTC."""
    seconds: float
    """How long it took, the start of Ray included."""
    settings: dict[str, Any]
    """What was asked for."""
    rows: tuple[Row, ...]
    """One a tile."""
    exit_code: int
    """What the command line exits with."""
    peak_memory_bytes: int
    """The most that the actors together held for themselves, as far as it was looked at."""

    def totals(self) -> dict[str, float | int]:
        """Add up the tiles."""
        outcomes = [row.outcome for row in self.rows if row.outcome]
        states = Counter(outcome.state for outcome in outcomes)
        return {
            "tiles": len(self.rows),
            **{state: states[state] for state in FINAL_STATES},
            "chips": sum(outcome.chips for outcome in outcomes),
            "lines": sum(outcome.lines for outcome in outcomes),
            "length_m": round(sum(outcome.length_m for outcome in outcomes), 3),
        }

    def stage_seconds(self) -> dict[str, float]:
        """Add up the work of each stage; stages run side by side, so this is more than the run took."""
        total: Counter[str] = Counter()
        for row in self.rows:
            total.update(row.outcome.stages if row.outcome else {})
        return {stage: round(total[stage], 3) for stage in STAGES}

    def to_json(self) -> dict[str, Any]:
        """Return what run.json holds."""
        record = {name: value for name, value in vars(self).items() if name != "rows"}
        return record | {
            "totals": self.totals(),
            "stage_seconds": self.stage_seconds(),
            "tiles": [asdict(row) for row in self.rows],
        }


def render_report(record: RunRecord, pictures: Mapping[TileKey, bytes]) -> str:
    """Return a page that needs no other file.

    Args:
        record: the run.
        pictures: a JPEG for some of the tiles.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"duration": _duration, "count": "{:,}".format}
    template = environment.from_string(files("centerlines").joinpath("report.html").read_text(encoding="utf-8"))
    totals, stages = record.totals(), record.stage_seconds()
    page = template.render(
        record=record,
        totals=totals,
        tiles_per_minute=60 * totals["tiles"] / max(record.seconds, 1e-9),
        several_jobs=len({job_id for job_id, _ in (row.key for row in record.rows)}) > 1,
        failed=[row for row in record.rows if row.state == "failed"],
        stages=[(STAGES[stage], seconds) for stage, seconds in stages.items()],
        longest=max(*stages.values(), 1e-9),
        pictures=[(row, base64.b64encode(pictures[row.key]).decode()) for row in record.rows if row.key in pictures],
    )
    # A reason may hold bytes of a file name that are no text.
    return page.encode(errors="backslashreplace").decode()


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
