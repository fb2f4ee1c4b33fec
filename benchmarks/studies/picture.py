"""The curves of a study as one stand-alone SVG file, with the reader's preferred colour scheme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from compiler.tools.picture import palette
from compiler.tools.picture.template import environment
from compiler.tools.report import charts

HERE = Path(__file__).parent
WIDTH, HEIGHT = 920.0, 300.0  # of a full-width panel, with the names of its curves
HALF_WIDTH, HALF_HEIGHT = 448.0, 190.0  # width of one of two adjacent panels
MARGIN, HEADING = 12.0, 30.0
COLOURS = ("accent", "warm", "ink", "quiet")
DASHES = ("none", "6 4", "1.5 3")  # for the next curves of the same colours
STYLE = """\
text { font-family: "Liberation Sans", "DejaVu Sans", Arial, Helvetica, sans-serif; }
text { font-size: 11px; fill: var(--quiet); }
.paper { fill: var(--paper); } .heading { font-size: 13px; font-weight: 600; fill: var(--ink); }
.grid line { stroke: var(--rule); } .axis text { text-anchor: middle; } .axis .y { text-anchor: end; }
.curve path { fill: none; stroke: var(--line); stroke-width: 1.5; stroke-linejoin: round; }
.curve text { fill: var(--line); font-size: 12px; }
"""


@dataclass(frozen=True)
class Panel:
    """A chart and its position in the picture."""

    chart: charts.Chart
    x: float
    y: float


def series(names: Sequence[str], curves: Sequence[Sequence[float]], window: int) -> list[charts.ChartSeries]:
    """Curves with one point per `window` steps, at the middle of the window. Colours follow the order."""
    return [
        charts.ChartSeries(f"s{index}", name, tuple(((k + 0.5) * window, value) for k, value in enumerate(curve)))
        for index, (name, curve) in enumerate(zip(names, curves, strict=True))
    ]


def wide(title: str, curves: Sequence[charts.ChartSeries]) -> charts.Chart:
    """A full-width panel."""
    return charts.chart(title, curves, WIDTH, HEIGHT, from_zero=False, named=True)


def half(title: str, curves: Sequence[charts.ChartSeries]) -> charts.Chart:
    """A half-width panel without names, in the colours of the wide one."""
    unnamed = [replace(curve, name="") for curve in curves]
    return charts.chart(title, unnamed, HALF_WIDTH, HALF_HEIGHT, from_zero=False, named=False)


def svg(title: str, rows: Sequence[Sequence[charts.Chart]]) -> str:
    """The SVG file, with rows of one wide panel or two halves. Equal arguments give equal bytes."""
    panels: list[Panel] = []
    y = MARGIN
    for row in rows:
        y += HEADING
        panels += [Panel(chart, MARGIN + column * (WIDTH - HALF_WIDTH), y) for column, chart in enumerate(row)]
        y += max(chart.height for chart in row)
    template = environment(HERE, HERE.parents[1] / "compiler" / "tools" / "report").get_template("curves.svg.j2")
    style = Markup(STYLE + palette.css() + _lines())
    return template.render(style=style, title=title, panels=panels, width=WIDTH + 2 * MARGIN, height=y + MARGIN)


def _lines() -> str:
    """CSS for the colour and stroke of each curve, by index. Names of dashed curves are in italics."""
    return "\n".join(
        f".s{index} {{ --line: var(--{colour}) }} .s{index} path {{ stroke-dasharray: {dash} }}"
        + (f" .s{index} text {{ font-style: italic }}" if dash != "none" else "")
        for index, (dash, colour) in enumerate((dash, colour) for dash in DASHES for colour in COLOURS)
    )
