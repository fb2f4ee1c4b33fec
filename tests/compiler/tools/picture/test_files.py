"""SVG, terminal text and trace: well-formed, complete, the same each time, and safe with any words in them."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len

from compiler.schedule.costs import Costs
from compiler.tools.picture.drawing import ExchangeShare, Lanes, Picture, Screen
from compiler.tools.picture.formats import FORMATS, TooMuchError, render
from compiler.tools.picture.html import html
from compiler.tools.picture.sheet import sheet_of, svg
from compiler.tools.picture.terminal import terminal
from compiler.tools.picture.trace_events import trace
from tests.compiler.tools.picture.browser import Browser
from tests.compiler.tools.picture.conftest import SIZES, make_measured, make_panel, make_picture

HOSTILE = ("<script>alert(1)</script>", "]]>&lt;'\"", "\x00\x1b[2J\u202e\ud800", "</style>{{ 7*7 }}", "{0}%s")
SVG = "{http://www.w3.org/2000/svg}"
LANES: Lanes = (
    ("F0", (ExchangeShare("dispatch F0.{0}@L1", 0, 0.25, 0.5),)),
    ("F3_B0", (ExchangeShare("combine B0.{1}@L1", 1, 0.5, 0.75),)),
)


def with_words(words: str) -> Picture:
    (panel,) = make_picture(("dualpipe", 2, 4)).panels
    panel = replace(panel, name=words, directions=(words, words), facts=((words, words),))
    panel = replace(panel, rows=tuple(replace(row, track=words) for row in panel.rows))
    return Picture(words, words, (panel, panel), (words,))


def with_lanes() -> Picture:
    panel = make_panel("dualpipe", 4, 10)
    return Picture("lanes", "units", (replace(panel, rows=tuple(replace(row, lanes=LANES) for row in panel.rows)),))


@pytest.mark.parametrize(("name", "P", "N"), SIZES)
def test_svg_is_xml_with_every_action_once(name: str, P: int, N: int) -> None:
    picture = make_picture((name, P, N))
    root = ElementTree.fromstring(svg(picture))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    drawn = Counter(title.split(" on rank")[0] for title in titles if " on rank" in title)
    assert drawn == Counter(d.label for cell in picture.panels[0].cells for d in cell.actions)
    assert root.get("role") == "img" and root.find(f"{SVG}desc") is not None
    assert not list(root.iter(f"{SVG}script")) and not list(root.iter(f"{SVG}image"))
    assert {value for element in root.iter() for key, value in element.items() if key.endswith("href")} == set()


def test_svg_in_bulk_has_every_box() -> None:
    picture = make_picture(("1f1b", 64, 100))
    root = ElementTree.fromstring(svg(picture))
    counts = {path.get("class"): (path.get("d") or "").count("M") for path in root.iter(f"{SVG}path")}
    assert counts["F d0"] == counts["B d0"] == 6400 and counts["bubble"] > 0


@pytest.mark.parametrize("words", HOSTILE)
def test_any_text_is_escaped(words: str) -> None:
    hostile, harmless = with_words(words), with_words("harmless")
    root, wanted = (ElementTree.fromstring(svg(picture).encode()) for picture in (hostile, harmless))
    assert [e.tag for e in root.iter()] == [e.tag for e in wanted.iter()]
    visible = words.translate(dict.fromkeys([0, 0x1B, 0x202E, 0xD800], "\ufffd"))
    assert any(visible in (e.text or "") for e in root.iter(f"{SVG}text"))
    assert "\x1b" not in terminal(hostile) and "\u202e" not in terminal(hostile)
    terminal(hostile).encode()
    assert {event["name"] for event in json.loads(trace(hostile))["traceEvents"]}


def test_numbers_fit_into_their_boxes_and_words_into_their_estimates(browser: Browser, tmp_path: Path) -> None:
    for picture in (make_picture(("dualpipe", 8, 20)), make_picture(("zb1p", 4, 120)), make_measured()):
        path = tmp_path / "picture.svg"
        path.write_text(svg(picture), "utf-8")
        browser.open(path)
        script = """[...document.querySelectorAll('.drawing rect + text')]
            .map((t) => [t.getBBox(), t.previousElementSibling.getBBox()])
            .map(([t, b]) => [t.x - b.x, b.x + b.width - t.x - t.width, t.y + t.height / 2 - b.y - b.height / 2])"""
        rooms = browser.evaluate(script)
        assert len(rooms) > 50
        assert all(left >= 0 and right >= 0 and abs(middle) < 2.5 for left, right, middle in rooms)
        lengths = browser.evaluate("[...document.querySelectorAll('svg > text')].map((t) => t.getComputedTextLength())")
        words = sheet_of(picture).words
        assert all(n <= w.width for n, w in zip(lengths, words, strict=True))
        assert not browser.errors


def test_lanes_are_drawn_and_named(browser: Browser, tmp_path: Path) -> None:
    picture = with_lanes()
    wanted = [f"dispatch F0.{n}@L1" for n in range(3)] + ["combine B0."]
    titles = [title.text or "" for title in ElementTree.fromstring(svg(picture)).iter(f"{SVG}title")]
    assert all(any(title.startswith(words) for title in titles) for words in wanted)
    exchanges = [e for e in json.loads(trace(picture))["traceEvents"] if e.get("cat") == "communication"]
    first = next(e for e in exchanges if e["name"] == "dispatch F0.0@L1")
    assert (first["ts"], first["dur"], first["tid"]) == (250, 250, 1)
    path = tmp_path / "lanes.html"
    path.write_text(html(picture), "utf-8")
    browser.open(path)
    box = browser.evaluate("document.getElementById('view').getBoundingClientRect().toJSON()")
    y = box["top"] + browser.evaluate("rows[0].lane") + 2
    browser.hover(box["left"] + browser.evaluate("toX(0.4)"), y)
    assert browser.evaluate("tip.textContent").startswith("dispatch F0.0@L1")
    assert not browser.errors


# ---------------------------------------------------------------- terminal


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colours", [False, True])
def test_text_fits_the_terminal(width: int, colours: bool) -> None:
    for picture in (
        make_picture(("dualpipe", 8, 20)),
        make_picture(("dualpipe", 4, 10), ("zbv", 4, 10)),
        make_measured(),
    ):
        output = terminal(picture, Screen(width, colours))
        assert ("\x1b[" in output) == colours
        plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
        assert "\x1b" not in plain and all(cell_len(line) <= width for line in plain.splitlines())


def test_text_shows_the_running_actions() -> None:
    lines = terminal(make_picture(("1f1b", 2, 2)), Screen(40)).splitlines()
    rows = [re.sub(r"(.)\1*", r"\1", line.split()[2]) for line in lines if line.startswith("rank")]
    assert rows == ["f·b·b", "·fbfb·"]  # F0.0 F0.1, then waits for each B; the last rank alternates
    pairs = terminal(make_picture(("dualpipe", 4, 10)), Screen(100))
    assert "%" in pairs and {"f", "F", "b", "B", "i", "I", "w", "W"} <= set(pairs)
    assert terminal(make_picture(("dualpipe", 4, 10)), Screen(100, ascii=True)).isascii()


def test_the_legend_shows_the_drawn_signs() -> None:
    """A pair is a sign without colours, and with them a half block in the tints of both of its actions."""
    picture = make_picture(("dualpipe", 4, 10))
    assert "% pair  · idle" in terminal(picture, Screen(100))
    rows, _, legend = terminal(picture, Screen(200, colours=True)).partition("\n\n")[2].partition("\n\n")
    drawn = re.search(r"(\x1b\[[0-9;]*m)▀▀▀\x1b\[0m pair ", legend)
    assert drawn is not None and f"{drawn[1]}▀\x1b" in rows
    assert "pair" not in terminal(make_picture(("1f1b", 2, 2)), Screen(100))


@pytest.mark.parametrize("unit", [Fraction(1), Fraction(1, 21)], ids=["a forward", "all of the schedule"])
def test_steps_of_whole_units_begin_at_columns(unit: Fraction) -> None:
    lines = terminal(make_picture(("1f1b", 4, 4), costs=Costs(unit, unit, unit)), Screen(100)).splitlines()
    rows = [line for line in lines if line.startswith("rank ")]
    runs = [len(run) for run in re.findall("f+|b+", rows[3].split()[2])]
    assert runs == [runs[0], 2 * runs[0]] * 4
    assert all(re.fullmatch("rank [0-3] [fb·]+ [ 0-9]{3}%", row) for row in rows), "nothing is drawn behind the end"


# ---------------------------------------------------------------- trace


def events(picture: Picture) -> list[dict[str, Any]]:
    value = json.loads(trace(picture))
    assert value["displayTimeUnit"] == "ms" and value["otherData"]["microseconds_of_unit"] == picture.us
    return value["traceEvents"]


@pytest.mark.parametrize(("name", "P", "N"), SIZES)
def test_a_trace_has_the_form_of_chrome_traces(name: str, P: int, N: int) -> None:
    trace_events = events(make_picture((name, P, N)))
    named = {(e["pid"], e["args"]["name"]) for e in trace_events if e["name"] == "process_name"}
    assert named == {(rank, f"rank {rank}") for rank in range(P)}
    threads = {(e["pid"], e["tid"], e["args"]["name"]) for e in trace_events if e["name"] == "thread_name"}
    assert len(threads) == 2 * P and {t[2] for t in threads} == {"compute", "communication"}
    for e in trace_events:
        assert e["ph"] in "MXCsf" and isinstance(e["pid"], int) and isinstance(e["name"], str)
        assert e["ph"] in "MC" or (e["ts"] >= 0 and isinstance(e["tid"], int))
        assert e["ph"] != "X" or e["dur"] >= 0
    sent, received = ({e["id"]: e for e in trace_events if e["ph"] == phase} for phase in "sf")
    assert sent.keys() == received.keys() and len(sent) == sum(e["ph"] == "s" for e in trace_events)
    assert all(sent[i]["ts"] <= received[i]["ts"] and sent[i]["pid"] != received[i]["pid"] for i in sent)
    inside = {(e["pid"], e["tid"], e["ts"]) for e in trace_events if e["ph"] == "X"}
    assert all((e["pid"], e["tid"], e["ts"]) in inside for e in trace_events if e["ph"] in "sf")  # flows bind to slices


def test_a_trace_has_every_action_at_its_time() -> None:
    picture = make_picture(("dualpipe", 4, 10))
    times = {(e["pid"], e["name"]): (e["ts"], e["dur"]) for e in events(picture) if e["ph"] == "X" and e["tid"] == 0}
    wanted = {
        (row.rank, d.label): (cell.start * 1000, (cell.end - cell.start) * 1000)
        for row in picture.panels[0].rows
        for cell in row.cells
        for d in cell.actions
    }
    assert times == wanted
    activations = [e["args"]["held"] for e in events(picture) if e["ph"] == "C" and e["pid"] == 0]
    assert max(activations) == 5 and activations[-1] == 0


def test_panels_and_tracks_are_processes_of_their_own() -> None:
    names = [e["args"]["name"] for e in events(make_measured()) if e["name"] == "process_name"]
    assert names[:2] == ["rank 0 planned", "rank 0 measured"] and len(names) == 8
    trace_events = events(make_picture(("dualpipe", 2, 4), ("1f1b", 2, 4)))
    assert len({e["args"]["name"] for e in trace_events if e["name"] == "process_name"}) == 4
    flows = [e["id"] for e in trace_events if e["ph"] == "s"]
    assert len(flows) == len(set(flows))


# ---------------------------------------------------------------- all


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_each_time(name: str) -> None:
    picture = make_picture(("dualpipe", 4, 10), ("1f1b", 4, 6))
    assert render(picture, name) == render(picture, name)


def test_too_large_pictures_suggest_another_format() -> None:
    picture = make_picture(("1f1b", 2, 3))
    assert all(form.max_actions >= 64 * 512 * 2 for form in FORMATS.values())

    class Huge(Picture):
        num_actions = 600_000  # type: ignore[assignment]

    huge = Huge(picture.title, picture.unit, picture.panels)
    with pytest.raises(TooMuchError, match="use --format terminal or html, or fewer micro-batches"):
        render(huge, "svg")
