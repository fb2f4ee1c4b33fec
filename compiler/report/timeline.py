"""The schedule as a figure: a row a pipeline rank, a box an action, a pair as two halves of one, time to the right."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from compiler.report import text
from compiler.report.values import Cell, Drawn, Report

ROW, GAP, TOP, AXIS = 26.0, 6.0, 8.0, 22.0  # pixels
PAGE_WIDTH, MARGIN = 820.0, 10.0  # the margin holds half of the last tick's number
MAX_UNIT = 110.0  # pixels of the typical step of a schedule with few steps
DIGIT, DIGIT_OF_PAIR = 6.2, 5.4  # pixels of a digit at the font sizes of style.css
KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "weight gradient, deferred",
}


@dataclass(frozen=True, slots=True)
class Box:
    """One action. `label` is "" where it would not fit; the title always says all."""

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
class Row:
    y: float  # of its middle
    label: str
    idle: str


@dataclass(frozen=True)
class Figure:
    """Boxes in the order of time, rank by rank. `ticks`: (x, label). `legend`: (css classes of a kind, its meaning)."""

    width: float
    height: float
    axis_y: float
    boxes: tuple[Box, ...]
    rows: tuple[Row, ...]
    ticks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[tuple[str, ...], str], ...]
    has_pairs: bool
    makespan: str
    idle: str


def schedule_figure(report: Report) -> Figure:
    """Geometry of the whole schedule; wider than the page (and then scrolled) where numbers would not fit."""
    cells = [cell for rank in report.schedule for cell in rank]
    assert cells, "a schedule has actions"
    makespan = float(max(cell.end for cell in cells))
    scale = _scale(cells, makespan)
    busy = [sum(float(cell.end - cell.start) for cell in rank) for rank in report.schedule]
    marks, step = text.ticks(0, makespan, max(2, int(makespan * scale / 90)))
    height = TOP + len(report.schedule) * (ROW + GAP)
    return Figure(
        width=makespan * scale + MARGIN,
        height=height + AXIS,
        axis_y=height,
        boxes=tuple(
            box for rank, row in enumerate(report.schedule) for cell in row for box in _boxes(rank, cell, scale)
        ),
        rows=tuple(
            Row(_top(rank) + ROW / 2, f"rank {rank}", f"{1 - time / makespan:.0%}") for rank, time in enumerate(busy)
        ),
        ticks=tuple((mark * scale, text.tick(mark, step)) for mark in marks),
        legend=_legend(cells),
        has_pairs=any(len(cell.actions) > 1 for cell in cells),
        makespan=text.number(makespan),
        idle=f"{1 - sum(busy) / (makespan * len(busy)):.1%}",
    )


def _scale(cells: list[Cell], makespan: float) -> float:
    """Pixels of a unit of time: the page's width, but never so small that a typical step loses its number."""
    typical = statistics.median(float(cell.end - cell.start) for cell in cells)
    digits = max(len(str(drawn.micro_batch)) for cell in cells for drawn in cell.actions)
    readable = (digits * DIGIT + 6) / typical
    return max(readable, min(PAGE_WIDTH / makespan, MAX_UNIT / typical))


def _top(rank: int) -> float:
    return TOP + rank * (ROW + GAP)


def _boxes(rank: int, cell: Cell, scale: float) -> list[Box]:
    """An action fills its row; those of a pair take the upper and the lower half."""
    share = ROW / len(cell.actions)
    x, width = float(cell.start) * scale, max(0.5, float(cell.end - cell.start) * scale - 1)
    digit = DIGIT if len(cell.actions) == 1 else DIGIT_OF_PAIR
    return [
        Box(
            x=x,
            y=_top(rank) + i * share,
            width=width,
            height=share,
            css=css(drawn),
            label=number if len(number := str(drawn.micro_batch)) * digit <= width else "",
            title=_title(rank, cell, drawn),
        )
        for i, drawn in enumerate(cell.actions)
    ]


def css(drawn: Drawn) -> str:
    """The classes that colour an action."""
    assert drawn.kind in KINDS and drawn.direction in (0, 1)
    return f"{drawn.kind} d{drawn.direction}"


def _title(rank: int, cell: Cell, drawn: Drawn) -> str:
    others = [other.label for other in cell.actions if other is not drawn]
    overlapped = f", overlapped with {others[0]}" if others else ""
    return f"{drawn.label} on rank {rank}{overlapped}: {_time(cell.start)} to {_time(cell.end)}"


def _time(value: object) -> str:
    return text.number(float(value))  # type: ignore[arg-type]


def _legend(cells: list[Cell]) -> tuple[tuple[tuple[str, ...], str], ...]:
    present = {css(drawn) for cell in cells for drawn in cell.actions}
    tints = [(tuple(f"{kind} d{i}" for i in (0, 1) if f"{kind} d{i}" in present), kind) for kind in KINDS]
    return tuple((classes, f"{kind}, {KINDS[kind]}") for classes, kind in tints if classes)
