"""The page about a run: what it says, and that it needs nothing else."""

import json
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from centerlines.progress import Outcome, Row
from centerlines.report import RunRecord, render_report

DONE = Row(
    ("job", "north"),
    "done",
    attempts=1,
    seconds=4.25,
    outcome=Outcome(
        "done", lines=1234, length_m=5678.91, chips=81, disagreement=0.0012, stages={"load": 1.5, "predict": 2.0}
    ),
)
EMPTY = Row(("job", "sea"), "empty", attempts=2, outcome=Outcome("empty", chips=9, stages={"predict": 0.5}))
FAILED = Row(("job", "south"), "failed", attempts=3, outcome=Outcome("failed", "has no CRS"))
HOSTILE = "<script>alert('x')</script>\"'&{{ 7*7 }}{% x %}"


def record(*rows: Row) -> RunRecord:
    """A run of these tiles."""
    return RunRecord(
        run_id="newark",
        version="0.1.0",
        started="2026-11-30T17:20:11+00:00",
        seconds=83.4,
        settings={"endpoint": "127.0.0.1:9000", "batch_size": 200, "chip_size": [128, 256]},
        rows=rows,
        exit_code=int(FAILED in rows),
        peak_memory_bytes=3 * 2**20,
    )


class Page(HTMLParser):
    """A page taken apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Iterable[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "img"}:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        """Every tag must be closed in order."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note the text of cells and headings."""
        if "style" in self.open:
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
        elif {"h1", "h2"} & set(self.open):
            self.headings.append(data)

    @property
    def text(self) -> str:
        """What a person reads, with single spaces."""
        return " ".join("".join(self.words).split())


def page(run: RunRecord, pictures: dict[tuple[str, str], bytes] | None = None) -> Page:
    """The page of a run, well formed."""
    parsed = Page(render_report(run, pictures or {}))
    assert parsed.open == []
    return parsed


def test_the_page_answers_what_a_person_asks() -> None:
    """What ran, did it work, how long did it take, what failed and why."""
    shown = page(record(DONE, EMPTY, FAILED))
    assert shown.headings == ["Centerlines: newark", "Failed tiles", "Tiles", "Time per stage", "Settings"]
    assert "Started 2026-11-30 17:20:11 UTC, took 1 min 23 s" in shown.text
    assert "1 of 3 tiles failed, 1 has lines, 1 has none." in shown.text
    assert "5.68km of lines" in shown.text
    assert ["south", "has no CRS", "3"] in shown.rows
    assert ["north", "done", "1,234", "5,678.9", "81", "0.0012", "1", "4.2"] in shown.rows
    assert ["sea", "empty", "0", "0.0", "9", "0.0000", "2", "0.0"] in shown.rows
    assert ["south", "failed", "-", "-", "-", "-", "3", "0.0"] in shown.rows
    assert ["predict", "2.50 s", ""] in [[cell.strip() for cell in row] for row in shown.rows]
    for setting in (["endpoint", "127.0.0.1:9000"], ["batch size", "200"], ["chip size", "128, 256"]):
        assert setting in shown.rows
    assert ["memory of the actors", "at most 3 MiB"] in shown.rows


def test_a_run_without_failures_says_so() -> None:
    """Success is the first thing to read, too."""
    shown = page(record(DONE, EMPTY))
    assert "No tile failed: 1 with lines, 1 without." in shown.text
    assert "Failed tiles" not in shown.headings


def test_tiles_of_several_jobs_show_their_job() -> None:
    """Two tiles of one name would look like one tile twice."""
    assert ["job", "tile"] not in [row[:2] for row in page(record(DONE)).rows]
    shown = page(record(DONE, replace(FAILED, key=("other", "north"))))
    assert [row[:2] for row in shown.rows[:2]] == [["job", "tile"], ["other", "north"]]


def test_pictures_are_inside_the_page() -> None:
    """The page is sent by mail and opened without its folder."""
    shown = page(record(DONE, EMPTY, FAILED), {DONE.key: b"\xff\xd8picture"})
    (image,) = (attributes for tag, attributes in shown.tags if tag == "img")
    assert image == {"alt": "imagery, mask and lines of north", "src": "data:image/jpeg;base64,/9hwaWN0dXJl"}
    assert "Pictures" in shown.headings


def test_nothing_is_loaded_from_elsewhere() -> None:
    """Imagery may be confidential, and many networks are closed."""
    text = render_report(record(DONE, FAILED), {DONE.key: b"x"})
    shown = Page(text)
    for tag, attributes in shown.tags:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base"}
        assert "href" not in attributes
        assert (attributes.get("src") or "data:").startswith("data:")
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"https?:|url\(|@import|//", re.sub(r"base64,[^\"]*", "", text))
    policies = [attributes for _, attributes in shown.tags if attributes.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    assert (policies[0]["content"] or "").startswith("default-src 'none';")


def test_hostile_names_are_shown_as_they_are() -> None:
    """File names come from anywhere, and the page from a trusted folder."""
    row = replace(DONE, key=(HOSTILE, HOSTILE))
    lost = replace(FAILED, key=(HOSTILE + "2", HOSTILE + "2"), outcome=Outcome("failed", HOSTILE))
    run = replace(record(row, lost), run_id=HOSTILE, settings={HOSTILE: HOSTILE})
    text = render_report(run, {row.key: b"x"})
    assert "<script" not in text
    shown = Page(text)
    assert shown.headings[0] == f"Centerlines: {HOSTILE}"
    assert [HOSTILE, HOSTILE, "done"] in [cells[:3] for cells in shown.rows]
    assert [HOSTILE + "2", HOSTILE + "2", HOSTILE, "3"] in shown.rows
    assert {tag for tag, _ in shown.tags} == {
        tag for tag, _ in Page(render_report(record(DONE, FAILED), {DONE.key: b""})).tags
    }


def test_bytes_that_are_no_text_do_not_stop_the_page() -> None:
    """The page is written as UTF-8 at the end of a run that took hours."""
    text = render_report(record(replace(FAILED, outcome=Outcome("failed", "tile \udce9.tif"))), {})
    assert "tile \\udce9.tif" in text.encode().decode()


@pytest.mark.parametrize("rows", [(), (FAILED,)])
def test_a_run_in_which_nothing_was_done_has_a_page(rows: tuple[Row, ...]) -> None:
    """No stage took any time: nothing may be divided by zero."""
    run = replace(record(*rows), seconds=0.0, peak_memory_bytes=0)
    assert ["memory of the actors", "not measured"] in page(run).rows


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.04, "0.0 s"), (59.9, "59.9 s"), (60, "1 min 0 s"), (7384, "2 h 3 min")]
)
def test_durations_are_in_units_for_people(seconds: float, words: str) -> None:
    """Nobody divides 7384 by 3600 in the head."""
    assert f"took {words}" in page(replace(record(DONE), seconds=seconds)).text


def test_five_thousand_tiles_make_a_page_that_still_opens() -> None:
    """The largest runs are those in which a page is needed most."""
    reason = (
        "tile x: has no coordinate reference system (CRS); give it one, for example with gdal_edit.py -a_srs EPSG:3424"
    )
    rows = [replace(DONE if n % 5 else FAILED, key=("job", f"E{n}_N{n}_2024")) for n in range(5000)]
    rows = [
        replace(row, outcome=replace(row.outcome, reason=reason)) if row.state == "failed" and row.outcome else row
        for row in rows
    ]
    started = time.process_time()
    text = render_report(record(*rows), {})
    assert time.process_time() - started < 10
    assert len(text) < 3_000_000
    assert text.count("<tr>") > 6000


def test_the_record_is_plain_json() -> None:
    """run.json is for programs."""
    told = json.loads(json.dumps(record(DONE, EMPTY, FAILED).to_json()))
    assert told["totals"] == {
        "tiles": 3, "done": 1, "empty": 1, "failed": 1, "chips": 90, "lines": 1234, "length_m": 5678.91,
    }  # fmt: skip
    assert told["stage_seconds"] == {"load": 1.5, "predict": 2.5, "blend": 0, "draw": 0, "write": 0}
    assert told["exit_code"] == 1
    assert [tile["state"] for tile in told["tiles"]] == ["done", "empty", "failed"]
    assert told["tiles"][2]["outcome"]["reason"] == "has no CRS"
    assert told["settings"]["chip_size"] == [128, 256]
