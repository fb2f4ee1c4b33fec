"""The geometry of a schedule: a row per rank, a box per action, a pair as two halves of a box, time to the right.

Everything is in pixels. SVG and the report draw it unchanged; the HTML page takes the rows from `layout` and scales
time itself. Bubbles are hatched. Below its boxes a rank has a thin lane of communication (exchanges of its actions, or
a tick where it sends a message) and a curve of the activations it holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from compiler.tools.picture import labels
from compiler.tools.picture.drawing import BoxRow, DrawnAction, Panel, StepCell
from compiler.tools.picture.palette import KINDS

DIGIT, DIGIT_OF_PAIR = 6.7, 5.8  # pixels per digit at font sizes 10.5 and 9 of DejaVu Sans, the widest font in use
MAX_UNIT = 110.0  # maximum pixels of a typical step
MARGIN = 10.0  # room for half of the last tick's number
AXIS = 22.0
HATCH = 7.0  # pixels from stroke to stroke
MANY = 8_000  # actions above which boxes are drawn in bulk, without numbers and titles


@dataclass(frozen=True, slots=True)
class Style:
    """Heights in pixels: of a row of boxes, of the lane and curve below it, and of the gap after it."""

    row: float = 26.0
    lane: float = 6.0
    memory: float = 14.0
    gap: float = 7.0
    top: float = 8.0


@dataclass(frozen=True, slots=True)
class RowTops:
    """The y positions of a row: tops of its boxes, lane and curve. `floor` is where the curve is zero."""

    y: float
    height: float
    lane_y: float
    floor: float


@dataclass(frozen=True, slots=True)
class Box:
    """One action. `label` is "" if it would not fit; the title is always complete."""

    x: float
    y: float
    width: float
    height: float
    css: str
    label: str
    title: str

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True, slots=True)
class Area:
    """A rectangle other than an action: a bubble, an exchange on the lane, an error."""

    x: float
    y: float
    width: float
    height: float
    css: str
    title: str


@dataclass(frozen=True, slots=True)
class RowLabel:
    """The label beside a row."""

    y: float  # middle of the label
    name: str
    idle: str
    peak: str
    peak_y: float


@dataclass(frozen=True)
class Figure:
    """Boxes by rank and time. `ticks`: (x, label). `legend`: (CSS classes of a kind, its meaning).

    `hatch`: strokes (x1, y1, x2, y2) over the bubbles. `curves`: by row, the corners of its curve of activations.
    `sends`: (x, y, css, height) of the arrow heads on the lane; a negative height points up, to a rank above.
    """

    width: float
    height: float
    axis_y: float
    lines: tuple[RowTops, ...]
    boxes: tuple[Box, ...]
    bubbles: tuple[Area, ...]
    hatch: tuple[tuple[float, float, float, float], ...]
    lanes: tuple[Area, ...]
    sends: tuple[tuple[float, float, str, float], ...]
    curves: tuple[tuple[tuple[float, float], ...], ...]
    rows: tuple[RowLabel, ...]
    ticks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[tuple[str, ...], str], ...]
    has_pairs: bool
    has_errors: bool
    makespan: str
    idle: str
    detailed: bool


def layout(panel: Panel, style: Style) -> tuple[tuple[RowTops, ...], float]:
    """Return the position of every row, and the total height. Tracks of one rank are close together, with one curve."""
    lines, y = [], style.top
    for i, row in enumerate(panel.rows):
        last = i + 1 == len(panel.rows) or panel.rows[i + 1].rank != row.rank
        height = style.row if not row.track else round(style.row * 0.8)
        errors = any(cell.error is not None for cell in row.cells)
        lane_y = y + height + 1 + 5 * errors
        has_lane = style.lane > 0 and last and (panel.messages or shows_lanes(panel))
        floor = lane_y + (style.lane + 1 if has_lane else 0) + (style.memory if last and row.live else 0)
        lines.append(RowTops(y, height, lane_y, floor))
        y = floor + (style.gap if last else 1)
    return tuple(lines), y


def figure_of(panel: Panel, unit: float, style: Style, makespan: float = 0, peak: float = 0) -> Figure:
    """Return the drawing at `unit` pixels per unit of time.

    `makespan` and `peak` (activations of a rank) are the maxima of several panels, which puts them on one scale.
    """
    assert panel.cells, "a schedule has actions"
    makespan = makespan or panel.makespan
    lines, height = layout(panel, style)
    detailed = sum(len(cell.actions) for cell in panel.cells) <= MANY
    marks, step = labels.ticks(0, makespan, max(2, int(makespan * unit / 90)))
    bubbles = tuple(
        area
        for row, line in zip(panel.rows, lines, strict=True)
        for area in _bubbles(row, line, unit, panel.end_of(row.track))
    )
    peak = peak or max((row.peak for row in panel.rows), default=0)
    return Figure(
        width=makespan * unit + MARGIN,
        height=height + AXIS,
        axis_y=height,
        lines=lines,
        boxes=tuple(
            box
            for row, line in zip(panel.rows, lines, strict=True)
            for cell in row.cells
            for box in _boxes(row, cell, line, unit, detailed)
        ),
        bubbles=bubbles,
        hatch=tuple(stroke for area in bubbles for stroke in _strokes(area)) if detailed else (),
        lanes=tuple(
            area
            for row, line in zip(panel.rows, lines, strict=True)
            for area in (*_lanes(row, line, unit, detailed and shows_lanes(panel)), *_errors(row, line, unit))
        ),
        sends=_sends(panel, lines, unit) if style.lane and detailed else (),
        curves=tuple(
            _curve(row, line, unit, peak, style, panel.makespan) for row, line in zip(panel.rows, lines, strict=True)
        ),
        rows=tuple(_label(panel, i, line, style) for i, line in enumerate(lines)),
        ticks=tuple((mark * unit, labels.tick(mark, step)) for mark in marks),
        legend=legend_of(panel.cells),
        has_pairs=any(len(cell.actions) > 1 for cell in panel.cells),
        has_errors=any(cell.error is not None for cell in panel.cells),
        makespan=labels.number(panel.makespan),
        idle=f"{panel.idle:.1%}",
        detailed=detailed,
    )


def shows_lanes(panel: Panel) -> bool:
    """Whether exchanges are drawn on the lanes. If there are none, or too many to distinguish, messages are drawn."""
    return 0 < panel.num_exchanges <= 2 * MANY


def pixels(panels: Sequence[Panel], page: float, max_width: float) -> float:
    """Return the pixels per unit of time. The drawing fills the page, or up to `max_width` pixels if typical steps need
    them for their numbers."""
    makespan = max(panel.makespan for panel in panels)
    lengths = [cell.end - cell.start for panel in panels for cell in panel.cells]
    typical = statistics.median(lengths) or makespan
    digits = max(len(str(drawn.micro_batch)) for panel in panels for cell in panel.cells for drawn in cell.actions)
    readable = min((digits * DIGIT + 6) / typical, max_width / makespan)
    return max(readable, min(page / makespan, MAX_UNIT / typical))


def legend_of(cells: Sequence[StepCell]) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Return the CSS classes and the meaning of every kind of action that is drawn."""
    present = {drawn.css for cell in cells for drawn in cell.actions}
    tints = [(tuple(f"{kind} d{i}" for i in (0, 1) if f"{kind} d{i}" in present), kind) for kind in KINDS]
    return tuple((classes, f"{kind}, {KINDS[kind]}") for classes, kind in tints if classes)


def title_of(row: BoxRow, cell: StepCell, drawn: DrawnAction) -> str:
    """Return the title of an action: its rank, times, and the action that it overlaps."""
    partners = [partner.label for partner in cell.actions if partner is not drawn]
    overlapped = f", overlapped with {partners[0]}" if partners else ""
    track = f", {row.track}" if row.track else ""
    note = f" · {cell.note}" if cell.note else ""
    times = f"{labels.number(cell.start)} to {labels.number(cell.end)}"
    return f"{drawn.label} on rank {row.rank}{track}{overlapped}: {times}{note}"


# ---------------------------------------------------------------- parts


def _boxes(row: BoxRow, cell: StepCell, line: RowTops, unit: float, detailed: bool) -> list[Box]:
    """An action fills its row; a pair has an upper and a lower half. Boxes are a pixel apart."""
    share = line.height / len(cell.actions)
    length = (cell.end - cell.start) * unit
    x, width = cell.start * unit, max(length - 1, min(length, 0.5))
    digit = DIGIT if len(cell.actions) == 1 else DIGIT_OF_PAIR
    return [
        Box(
            x=x,
            y=line.y + i * share,
            width=width,
            height=share,
            css=drawn.css,
            label=number if detailed and len(number := str(drawn.micro_batch)) * digit <= width else "",
            title=title_of(row, cell, drawn) if detailed else "",
        )
        for i, drawn in enumerate(cell.actions)
    ]


def _bubbles(row: BoxRow, line: RowTops, unit: float, makespan: float) -> list[Area]:
    """The idle times of a rank: before, between and after its steps, up to the end of its track."""
    starts = [0.0, *(cell.end for cell in row.cells)]
    ends = [*(cell.start for cell in row.cells), makespan]
    return [
        Area(
            start * unit,
            line.y,
            (end - start) * unit - 1,
            line.height,
            "bubble",
            f"rank {row.rank} idle: {labels.number(start)} to {labels.number(end)}",
        )
        for start, end in zip(starts, ends, strict=True)
        if (end - start) * unit > 1.5
    ]


def _strokes(area: Area) -> list[tuple[float, float, float, float]]:
    """Return diagonals from the lower left to the upper right, on one grid for all rectangles of a row."""
    left, right, top, bottom = area.x, area.x + area.width, area.y, area.y + area.height
    strokes = []
    k = int((left + top) // HATCH) + 1  # the diagonal x + y = k HATCH
    while k * HATCH < right + bottom:
        total = k * HATCH
        x1, x2 = max(left, total - bottom), min(right, total - top)
        if x2 - x1 > 0.5:
            strokes.append((x1, total - x1, x2, total - x2))
        k += 1
    return strokes


def _lanes(row: BoxRow, line: RowTops, unit: float, has_lanes: bool) -> list[Area]:
    return [
        Area(
            e.start * unit,
            line.lane_y,
            max(0.5, (e.end - e.start) * unit - 0.5),
            5.0,
            f"exchange d{e.direction}",
            f"{e.label} on rank {row.rank}: {labels.number(e.start)} to {labels.number(e.end)}",
        )
        for e in (row.exchanges if has_lanes else ())
    ] + [
        Area(
            copy.start * unit,
            line.lane_y + 2.5 * copy.is_return,
            max(0.5, (copy.end - copy.start) * unit - 0.5),
            2.5,
            f"exchange d{copy.is_return:d}",
            f"{copy.label} on rank {row.rank}: {labels.number(copy.start)} to {labels.number(copy.end)}",
        )
        for copy in (row.copies if has_lanes else ())
    ]


def _errors(row: BoxRow, line: RowTops, unit: float) -> list[Area]:
    """Bars under measured steps. The height is the relative error, up to 50%; slower steps have a warm colour."""
    return [
        Area(cell.start * unit, line.y + line.height, max(0.5, (cell.end - cell.start) * unit - 1), height, css, "")
        for cell in row.cells
        if cell.error is not None and (height := min(4.0, 8 * abs(cell.error))) > 0.3
        for css in ["error" if cell.error > 0 else "error fast"]
    ]


def _sends(panel: Panel, lines: Sequence[RowTops], unit: float) -> tuple[tuple[float, float, str, float], ...]:
    """An arrow head for each message, under the end of the step that sends it."""
    last = {row.rank: line for row, line in zip(panel.rows, lines, strict=True)}
    return tuple(
        (m.sent * unit, last[m.source].lane_y + (0.5 if down else 5), m.kind, 4.5 if down else -4.5)
        for m in panel.messages
        for down in [m.target > m.source]
        if not shows_lanes(panel)
    )


def _curve(
    row: BoxRow, line: RowTops, unit: float, peak: float, style: Style, makespan: float
) -> tuple[tuple[float, float], ...]:
    """Return the corners of the step curve, from the floor up and back; () if there is none."""
    if not row.live or not peak:
        return ()
    scale = (style.memory - 2) / peak
    corners, height = [(0.0, line.floor)], line.floor
    for time, amount in row.live:
        corners.append((time * unit, height))
        height = line.floor - amount * scale
        corners.append((time * unit, height))
    return (*corners, (makespan * unit, height), (makespan * unit, line.floor))


def _label(panel: Panel, index: int, line: RowTops, style: Style) -> RowLabel:
    row = panel.rows[index]
    first = index == 0 or panel.rows[index - 1].rank != row.rank
    name = f"rank {row.rank}" if not row.track else f"{row.rank} {row.track}" if first else row.track
    peak = labels.number(row.peak) if row.live else ""
    return RowLabel(line.y + line.height / 2, name, f"{panel.idle_of(row):.0%}", peak, line.floor - style.memory / 2)
