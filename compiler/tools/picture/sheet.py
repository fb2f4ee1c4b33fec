"""The sheet around the figures of a picture, with title, legend, names of rows and table, and its SVG."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from compiler.tools.picture import labels, palette
from compiler.tools.picture.drawing import Panel, Picture, TextTable
from compiler.tools.picture.geometry import Figure, Style, figure_of, legend_of, pixels, shows_lanes
from compiler.tools.picture.labels import px
from compiler.tools.picture.template import FOLDER, environment

PAGE = 1100.0  # width of a small picture in pixels; wide schedules grow up to MAX_PAGE, so that numbers fit
MAX_PAGE = 6000.0
PADDING, NAMES, SIDE = 28.0, 62.0, 84.0
PADDING_OF_CELL = 26.0


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text. `css`: title, heading, quiet or strong; `anchor`: start, middle or end; `y`: its baseline."""

    x: float
    y: float
    size: float
    css: str
    text: str
    anchor: str = "start"

    @property
    def width(self) -> float:
        """An upper estimate in pixels."""
        return text_width(self.text, self.size) * (1.15 if self.css in ("title", "heading") else 1.0)


@dataclass(frozen=True, slots=True)
class Swatch:
    """A sample in the legend. `css`: a tint, or bubble, send, curve."""

    x: float
    y: float
    css: str


@dataclass(frozen=True)
class Sheet:
    """A sheet, in pixels. `figures`: (x, y, figure); `summary`: a description for screen readers."""

    width: float
    height: float
    title: str
    summary: str
    words: tuple[Words, ...]
    swatches: tuple[Swatch, ...]
    rules: tuple[tuple[float, float, float], ...]  # (x1, x2, y)
    figures: tuple[tuple[float, float, Figure], ...]


def sheet_of(picture: Picture, page: float = PAGE, max_width: float = MAX_PAGE, style: Style | None = None) -> Sheet:
    """Return the sheet of a picture. The drawing is as wide as its numbers need, at most `max_width` pixels."""
    unit = pixels(picture.panels, page - 2 * PADDING - NAMES - SIDE, max_width)
    makespan = picture.makespan
    words: list[Words] = [Words(PADDING, 44, 20, "title", picture.title)]
    y = 44.0
    for note in (*([picture.facts] if picture.facts else []), *picture.notes):
        y += 20
        words.append(Words(PADDING, y, 12.5, "quiet", note))
    y += 16
    room = max(page, PADDING + NAMES + makespan * unit + SIDE) - PADDING
    swatches, legend, y = _legend(picture, y, room)
    words += legend
    highest = max(row.peak for panel in picture.panels for row in panel.rows)
    figures: list[tuple[float, float, Figure]] = []
    for panel in picture.panels:
        if len(picture.panels) > 1:
            y += 26
            words.append(Words(PADDING, y, 13, "heading", panel.name))
            y += 4
        figure = figure_of(panel, unit, style or Style(), makespan, highest)
        words += _row_labels(figure, PADDING + NAMES, y)
        figures.append((PADDING + NAMES, y, figure))
        y += figure.height
    words.append(Words(PADDING + NAMES, y + 12, 11, "quiet", f"time in {picture.unit}"))
    y += 30
    width = PADDING + NAMES + figures[0][2].width + SIDE + PADDING
    rules: list[tuple[float, float, float]] = []
    if picture.table:
        table, rules, y, right = _table(picture.table, y)
        words += table
        width = max(width, right + PADDING)
    width = max([width, *(w.x + w.width + PADDING for w in words if w.anchor == "start")])
    return Sheet(
        width, y + PADDING / 2, picture.title, summary_of(picture), tuple(words), swatches, tuple(rules), tuple(figures)
    )


def text_width(line: str, size: float) -> float:
    """Return an upper estimate of the pixels of a line, from DejaVu Sans, the widest font in use."""
    return sum(_advance(c) for c in line) * size


def summary_of(picture: Picture) -> str:
    """Return the description of the picture for screen readers."""
    parts = []
    for panel in picture.panels:
        ranks = len({row.rank for row in panel.rows})
        facts = "; ".join(f"{name} {value}" for name, value in panel.facts)
        default = f"a step of {labels.number(panel.makespan)}, idle {panel.idle:.1%}"
        parts.append(f"{panel.name} on {ranks} ranks: {facts or default}")
    return f"Timeline of {'. '.join(parts)}. Time in {picture.unit}."


def _advance(c: str) -> float:
    if unicodedata.combining(c):
        return 0.0
    if unicodedata.east_asian_width(c) in "WF":
        return 1.05
    if c in "iljftrI.,:;|!' ()[]·":
        return 0.42
    return 0.99 if c in "mwMW%@—…" else 0.84 if c in "+−<>=" else 0.7


def _legend(picture: Picture, y: float, room: float) -> tuple[tuple[Swatch, ...], list[Words], float]:
    """Return samples and their meanings, in lines of at most `room` pixels, and the y where they end."""
    x, swatches, words = PADDING, [], []
    for classes, meaning in legend_entries(picture):
        width = 17 * len(classes) + 4 + text_width(meaning, 11.5)
        if x > PADDING and x + width > room:
            x, y = PADDING, y + 20
        for css in classes:
            swatches.append(Swatch(x, y, css))
            x += 17
        words.append(Words(x + 4 * bool(classes), y + 10.5, 11.5, "quiet", meaning))
        x += width - 17 * len(classes) + 16
    return tuple(swatches), words, y + 20


def legend_entries(
    picture: Picture, lanes_of: Callable[[Panel], bool] = shows_lanes
) -> list[tuple[tuple[str, ...], str]]:
    """Return the legend of a picture as (classes of the samples, meaning). `lanes_of`: whether exchanges are drawn."""
    rows = [row for panel in picture.panels for row in panel.rows]
    cells = [cell for row in rows for cell in row.cells]
    entries = list(legend_of(cells))
    if any(len(cell.actions) > 1 for cell in cells):
        entries.append((("pair",), "overlapped pair"))
    entries.append((("bubble",), "idle"))
    if any(lanes_of(panel) for panel in picture.panels):
        copied = any(row.copies for row in rows)
        entries.append((("exchange",), "copies to the host, and back below" if copied else "communication"))
    if any(panel.messages and not lanes_of(panel) for panel in picture.panels):
        entries.append((("send",), "message to the next or the previous rank"))
    if any(row.live for row in rows):
        entries.append((("curve",), "activations held"))
    if any(cell.error is not None for cell in cells):
        entries.append((("error", "error fast"), "slower, or faster, than planned"))
    directions = max((panel.directions for panel in picture.panels), key=len)
    if len(directions) > 1:
        entries.append(((), f"pale: {directions[0]}; deep: {directions[1]}"))
    return entries


def _row_labels(figure: Figure, x: float, y: float) -> list[Words]:
    """Return names at the left of the rows, and idle times and peak activations at the right."""
    right = x + figure.width + 2
    words = []
    for row in figure.rows:
        words.append(Words(x - 10, y + row.y + 4, 11, "quiet", row.name, "end"))
        words.append(Words(right, y + row.y + 4, 11, "quiet", f"idle {row.idle}"))
        if row.peak:
            words.append(Words(right, y + row.peak_y + 4, 9.5, "quiet", f"peak {row.peak}"))
    return words


def _table(table: TextTable, y: float) -> tuple[list[Words], list[tuple[float, float, float]], float, float]:
    """Lay out a table, numbers aligned to the right and words to the left. Also returns its lower and right edge."""
    lines = (table.heads, *table.rows)
    widths = [max(text_width(line[i], 12.5) for line in lines) + PADDING_OF_CELL for i in range(len(table.heads))]
    words, rules = [], []
    y += 22
    right = PADDING + sum(widths)
    for number, line in enumerate(lines):
        x = PADDING
        for i, (value, width) in enumerate(zip(line, widths, strict=True)):
            css = "quiet" if number == 0 or i == 0 else "strong"
            place = (x, "start") if i == 0 else (x + width, "end")
            words.append(Words(place[0], y, 12.5, css, value, place[1]))
            x += width
        rules.append((PADDING, right, y + 7))
        y += 24
    return words, rules, y, right


# --- A picture as one SVG file: light or dark as the reader prefers, with titles on hover, without scripts

STYLE = """\
text { font-family: "Liberation Sans", "DejaVu Sans", Arial, Helvetica, sans-serif; fill: var(--ink); }
.paper { fill: var(--paper); }
.title { font-weight: 600; } .heading { font-weight: 600; } .quiet { fill: var(--quiet); }
.rule { stroke: var(--rule); }
"""


def svg(picture: Picture) -> str:
    """Return the file. Pure: equal values give equal bytes, and every text is escaped.

    Above `geometry.MANY` actions a panel is drawn in bulk: one path per colour, without numbers and titles.
    """
    return (
        environment()
        .get_template("sheet.svg.j2")
        .render(sheet=sheet_of(picture), style=Markup(STYLE + palette.css() + figure_css()), bulk=bulk)
    )


def figure_css() -> str:
    """Return the CSS for `figure.svg.j2`."""
    return (FOLDER / "figure.css").read_text("utf-8")


def bulk(figure: Figure) -> Iterable[tuple[str, str]]:
    """Yield (css, path) of all boxes of a colour, and of all bubbles: a few bytes per box."""
    areas = [(area.css, area.x, area.y, area.width, area.height) for area in (*figure.bubbles, *figure.lanes)]
    areas += [(box.css, box.x, box.y, box.width, box.height) for box in figure.boxes]
    for css, group in groupby(sorted(areas), key=lambda area: area[0]):
        yield css, "".join(f"M{px(x)} {px(y)}h{px(w)}v{px(h)}h{px(-w)}z" for _, x, y, w, h in group)
