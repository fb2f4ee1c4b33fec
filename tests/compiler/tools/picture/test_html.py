"""The page in a real browser: drawing, hovering, clicking, zooming; light and dark; nothing is loaded or executed."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from compiler.tools.picture.drawing import BoxRow, Picture
from compiler.tools.picture.html import data_of, html
from compiler.tools.picture.palette import DARK, LIGHT
from tests.compiler.tools.picture.browser import Browser
from tests.compiler.tools.picture.conftest import make_measured, make_picture

HOSTILE = '</script><script>alert(1)</script><img src=x onerror=alert(1)>"\x1b\u202e'
LEFT, RIGHT = 78, 74  # of viewer.js


class Page:
    """A picture in the browser, and where things are on it."""

    def __init__(self, browser: Browser, picture: Picture, folder: Path, **more: Any) -> None:
        path = folder / "page.html"
        path.write_text(html(picture), "utf-8")
        browser.open(path, **more)
        self.browser, self.picture = browser, picture
        self.rows = [row for panel in data_of(picture)["panels"] for row in panel["rows"]]

    def state(self) -> dict[str, Any]:
        dataset = self.browser.evaluate("({...document.getElementById('view').dataset})")
        return dataset | {key: float(dataset[key]) for key in ("from", "to", "drawn")}

    def box(self, name: str) -> dict[str, float]:
        return self.browser.evaluate(f"document.querySelector({name!r}).getBoundingClientRect().toJSON()")

    def at(self, row: int, time: float, half: int = 0, inset: float = 0.0) -> tuple[float, float]:
        """The place of a time of a row on the screen, in its upper or lower half."""
        box, state = self.box("#view"), self.state()
        unit = (box["width"] - LEFT - RIGHT) / (state["to"] - state["from"])
        y = box["top"] + self.rows[row]["y"] + self.rows[row]["height"] * (0.25 + 0.5 * half)
        return box["left"] + LEFT + (time - state["from"]) * unit + inset, y

    def tip(self) -> str:
        return self.browser.evaluate("(tip.hidden ? '' : tip.textContent)")

    def image(self) -> Image.Image:
        return Image.open(io.BytesIO(self.browser.screenshot())).convert("RGB")

    def press(self, selector: str) -> None:
        box = self.box(selector)
        self.browser.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def rows_of(picture: Picture) -> list[BoxRow]:
    return [row for panel in picture.panels for row in panel.rows]


def colour(image: Image.Image, place: tuple[float, float]) -> str:
    r, g, b = image.crop((int(place[0]), int(place[1]), int(place[0]) + 1, int(place[1]) + 1)).tobytes()
    return f"#{r:02x}{g:02x}{b:02x}"


@pytest.mark.parametrize("dark", [False, True])
def test_every_action_is_drawn_in_its_colour_and_place(browser: Browser, tmp_path: Path, dark: bool) -> None:
    picture = make_picture(("dualpipe", 4, 10))
    page = Page(browser, picture, tmp_path, dark=dark)
    theme, image = DARK if dark else LIGHT, page.image()
    assert colour(image, (3, 3)) == theme.paper
    for number, row in enumerate(rows_of(picture)):
        for cell in row.cells:
            for half in (0, 1):
                drawn = cell.actions[half if len(cell.actions) > 1 else 0]
                pixel = colour(image, page.at(number, cell.start, half, inset=2))
                assert pixel == theme.tints[f"{drawn.kind}{drawn.direction}"], (drawn.label, half)
    idle = colour(image, page.at(1, 0.5))
    assert idle in (theme.idle, theme.hatch) or idle not in theme.tints.values()
    assert page.state()["drawn"] == sum(len(row.cells) for row in rows_of(picture))
    assert browser.errors == [] and [url.partition(":")[0] for url in browser.requests] == ["file"]


def test_hovering_describes_the_action(browser: Browser, tmp_path: Path) -> None:
    page = Page(browser, make_picture(("dualpipe", 4, 10)), tmp_path)
    browser.hover(*page.at(0, 0.5))
    tip = page.tip()
    for words in ("F0.0", "forward of stage 0, micro-batch 0", "rank 0", "from the first rank on", "0 to 1, 1 long"):
        assert words in tip, tip
    assert page.state()["focus"] == "F0.0"
    pair = next(cell for cell in page.picture.panels[0].rows[0].cells if len(cell.actions) > 1)
    browser.hover(*page.at(0, (pair.start + pair.end) / 2, half=1))
    assert page.tip().startswith(pair.actions[1].label) and f"overlapped with {pair.actions[0].label}" in page.tip()
    browser.hover(*page.at(1, 0.5))
    assert page.tip().startswith("idle") and "0 to 1, 1 long" in page.tip() and "F0.0 of rank 0" in page.tip()
    browser.hover(5, 5)
    assert page.tip() == "" and page.state()["focus"] == ""


def test_the_memory_curve_counts_as_the_simulator_does(browser: Browser, tmp_path: Path) -> None:
    picture = make_picture(("dualpipe", 8, 20), ("1f1b", 4, 6))
    Page(browser, picture, tmp_path)
    rows = browser.evaluate("rows.map((row) => [row.peak, row.amounts.at(-1), row.busy])")
    wanted = [[row.peak, 0, pytest.approx(row.busy)] for row in rows_of(picture)]
    assert rows == wanted


def test_buttons_wheel_and_drag_move_the_view(browser: Browser, tmp_path: Path) -> None:
    page = Page(browser, make_picture(("dualpipe", 4, 10)), tmp_path)
    initial = page.state()
    assert (initial["from"], initial["to"]) == (0, 29)
    page.press("#in")
    zoomed_once = page.state()
    assert zoomed_once["to"] - zoomed_once["from"] == pytest.approx(29 / 1.5) and zoomed_once["from"] == pytest.approx(
        29 / 6
    )
    place = page.at(0, zoomed_once["from"] + 2)
    browser.mouse("mouseWheel", *place, deltaX=0, deltaY=-300, modifiers=2)
    browser.settle()
    zoomed = page.state()
    assert zoomed["to"] - zoomed["from"] == pytest.approx(29 / 1.5 / 2.718281828)
    assert page.at(0, zoomed_once["from"] + 2)[0] == pytest.approx(place[0], abs=0.5)  # zoomed around the pointer
    x, y = place
    browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", x + 60, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 60, y, button="left", clickCount=1)
    browser.settle()
    dragged = page.state()
    unit = (page.box("#view")["width"] - LEFT - RIGHT) / (zoomed["to"] - zoomed["from"])
    assert dragged["from"] == pytest.approx(max(0, zoomed["from"] - 60 / unit), abs=0.5 / unit)
    assert dragged["focus"] == ""  # a drag is not a click
    page.press("#fit")
    assert (page.state()["from"], page.state()["to"]) == (0, 29)
    page.press("#arrows")
    assert page.state()["arrows"] == "true"
    assert browser.evaluate("document.getElementById('arrows').getAttribute('aria-pressed')") == "true"


def test_a_click_holds_an_action_and_keys_walk_from_it(browser: Browser, tmp_path: Path) -> None:
    page = Page(browser, make_picture(("1f1b", 4, 6)), tmp_path)
    browser.click(*page.at(0, 0.5))
    browser.hover(5, 5)
    assert page.state()["focus"] == "F0.0"  # held, though the pointer has left
    browser.press("ArrowRight")
    assert page.state()["focus"] == "F0.1"
    assert "F0.1" in browser.evaluate("document.getElementById('said').textContent")
    browser.press("ArrowDown")
    assert page.state()["focus"] == "F1.0"  # what rank 1 does in the middle of F0.1
    browser.press("Enter")
    state = page.state()
    assert state["to"] - state["from"] == pytest.approx(8) and state["from"] == 0
    browser.press("-")
    browser.press("0")
    browser.press("Escape")
    assert (page.state()["focus"], page.state()["to"]) == ("", 27)
    assert browser.evaluate("document.activeElement.id") == "view"


def test_the_theme_follows_the_system_and_the_button(browser: Browser, tmp_path: Path) -> None:
    page = Page(browser, make_picture(("dualpipe", 2, 4)), tmp_path, dark=True)
    assert colour(page.image(), (3, 3)) == DARK.paper
    page.press("#theme")
    image = page.image()
    assert colour(image, (3, 3)) == LIGHT.paper
    assert colour(image, page.at(0, 0, inset=2)) == LIGHT.tints["F0"]


@pytest.mark.parametrize(("P", "N"), [(16, 120), (64, 512)])
def test_large_schedules_give_small_files_and_draw_only_visible_boxes(
    browser: Browser, tmp_path: Path, P: int, N: int
) -> None:
    picture = make_picture(("dualpipe", P, N))
    assert len(html(picture)) < 60_000 + 16 * picture.num_actions
    page = Page(browser, picture, tmp_path)
    assert 0 < page.state()["drawn"] < 40_000 and browser.errors == []
    browser.evaluate("show(0, 12)")
    browser.settle()
    num_visible = sum(cell.start < 12 for row in rows_of(picture)[:9] for cell in row.cells)
    assert 0 < page.state()["drawn"] <= num_visible + 24
    browser.hover(*page.at(0, 1.5))
    assert page.tip().startswith("F0.1")
    browser.evaluate("document.getElementById('view').focus()")
    browser.press("ArrowRight")
    for _ in range(12):
        browser.press("ArrowDown")
    assert int(page.state()["scroll"]) > 0 or P * 60 < 800  # the selected rank is scrolled to
    assert not browser.errors


def test_planned_and_measured_rows_are_distinguished(browser: Browser, tmp_path: Path) -> None:
    page = Page(browser, make_measured(1.25), tmp_path)
    browser.hover(*page.at(1, 0.5))  # rank 0, measured
    assert "measured 1.25 ms, planned 1 ms (+25%)" in page.tip() and page.state()["track"] == "measured"
    browser.hover(*page.at(0, 0.5))
    assert page.state()["track"] == "planned" and "+25%" not in page.tip()
    assert "F0" in browser.evaluate("document.getElementById('table').textContent")
    warm = colour(
        page.image(), (page.at(1, 0.3)[0], page.box("#view")["top"] + page.rows[1]["y"] + page.rows[1]["height"] + 1)
    )
    red, _, blue = (int(warm[i : i + 2], 16) for i in (1, 3, 5))
    assert red - blue > 20, warm  # the bar of an action that was slower
    assert not browser.errors


def test_hostile_text_is_escaped(browser: Browser, tmp_path: Path) -> None:
    (panel,) = make_picture(("dualpipe", 2, 4)).panels
    hostile = replace(panel, name=HOSTILE, directions=(HOSTILE, HOSTILE), facts=((HOSTILE, HOSTILE),))
    hostile = replace(hostile, rows=tuple(replace(row, track=HOSTILE) for row in hostile.rows))
    page = Page(browser, Picture(HOSTILE, HOSTILE, (hostile, hostile), (HOSTILE,)), tmp_path)
    assert browser.evaluate("document.title") == HOSTILE.replace("\x1b", "\ufffd").replace("\u202e", "\ufffd")
    assert browser.evaluate("document.scripts.length") == 2 and browser.evaluate("document.images.length") == 0
    browser.hover(*page.at(0, 0.5))
    assert page.tip().startswith("F0.0") and "<img" in page.tip()
    assert browser.errors == [] and len(browser.requests) == 1


def test_a_page_is_the_same_bytes_each_time() -> None:
    picture = make_picture(("dualpipe", 4, 10), ("1f1b", 4, 6))
    assert html(picture) == html(picture)
    assert "http" not in html(picture).replace('http-equiv="Content-Security-Policy"', "")
