"""`dsc compare --format html`: runs beside each other as one page: no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from compiler.predict.numbers import span
from compiler.tools.picture import labels, palette
from compiler.tools.picture.template import environment
from compiler.tools.report import charts
from compiler.tools.report.compared import ABSENT, Compared, Figures, Run, over

FOLDER = Path(__file__).parent
COLOURS = 8  # of runs, in style.css; runs beyond these have the same ones, dashed
NAME = 20  # characters of a name beside its curve
SCALES = ((1e9, "billion tokens"), (1e6, "million tokens"), (1e3, "thousand tokens"), (1, "tokens"))
TIMES = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
HEADS = ("steps", "tokens", "loss", "loss at equal tokens", "validation", "tokens a second", "trained for", "goodput")


@dataclass(frozen=True)
class View:
    """What the template shows. A row of `table` has a cell for each of HEADS; `heads` leaves out those nobody has."""

    runs: tuple[tuple[str, str, str], ...]  # css class, name, folder
    heads: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    equal_tokens: str
    loss: tuple[charts.Chart, ...]
    panels: tuple[charts.Chart, ...]
    differences: tuple[tuple[str, tuple[tuple[str, bool], ...]], ...]  # key, and by run its text, whether it differs
    notes: tuple[str, ...]


def compare_html(compared: Compared, title: str = "Runs compared") -> str:
    """The page. Pure: equal values give equal bytes, and every text in them is escaped."""
    # Ours: nothing of the runs is in it.
    style = Markup(palette.css(with_series=True) + (FOLDER / "style.css").read_text("utf-8"))
    template = environment(FOLDER).get_template("compare.html.j2")
    return template.render(view=view_of(compared), style=style, title=title)


def view_of(compared: Compared) -> View:
    """Curves, table and differences."""
    runs = compared.runs
    cells = [cells_of(each) for each in compared.figures]
    shown = [i for i in range(len(HEADS)) if any(row[i] != ABSENT for row in cells)]
    panels = [_panel(runs, key, title, from_zero) for key, title, from_zero in charts.PANELS]
    return View(
        runs=tuple((_css(i), run.name, str(run.folder)) for i, run in enumerate(runs)),
        heads=tuple(HEADS[i] for i in shown),
        table=tuple(tuple(row[i] for i in shown) for row in cells),
        equal_tokens=labels.count(compared.common_tokens) if compared.common_tokens is not None else "",
        loss=tuple(
            chart
            for key, title in (("loss", "Training loss"), ("validation_loss", "Validation loss"))
            for axis in ("tokens", "time")
            if (chart := _curves(runs, key, title, axis)) is not None
        ),
        panels=tuple(panel for panel in panels if panel is not None),
        differences=tuple(
            (each.path, tuple((text, text != each.values[0]) for text in each.values)) for each in compared.differences
        ),
        notes=notes_of(compared),
    )


def cells_of(figures: Figures) -> tuple[str, ...]:
    """The texts of one run under HEADS."""
    losses = [
        ABSENT if loss is None else f"{loss:.4f}" for loss in (figures.loss, figures.loss_at, figures.validation_loss)
    ]
    return (
        f"{figures.steps:,}",
        ABSENT if figures.tokens is None else labels.count(figures.tokens),
        *losses,
        ABSENT if figures.tokens_per_s is None else labels.number(figures.tokens_per_s),
        span(figures.trained_s),
        ABSENT if figures.goodput is None else f"{figures.goodput:.1%}",
    )


def notes_of(compared: Compared) -> tuple[str, ...]:
    """What is not as it should be in run folders."""
    notes = [
        f"{name}: its spec.resolved is missing or damaged, so its keys are not compared" for name in compared.unread
    ]
    for run in compared.runs:
        if run.damaged:
            notes.append(f"{run.name}: {run.damaged:,} damaged lines of metrics.jsonl are left out")
    return tuple(notes)


def _css(index: int) -> str:
    return f"r{index % COLOURS}" + " again" * (index >= COLOURS)


def _short(name: str) -> str:
    return name if len(name) <= NAME else "…" + name[1 - NAME :]


def _curves(runs: Sequence[Run], key: str, title: str, axis: str) -> charts.Chart | None:
    """`key` of all runs over tokens or time, in the largest unit in which the longest curve has one."""
    found = [over(run.metrics, key, axis) for run in runs]
    longest = max((points[-1][0] for points in found if points), default=0.0)
    if longest <= 0:
        return None
    scale, unit = next((each for each in (SCALES if axis == "tokens" else TIMES) if longest >= each[0]), (1, "seconds"))
    series = [
        charts.Series(_css(i), _short(run.name), tuple((x / scale, y) for x, y in points), dots=key != "loss")
        for i, (run, points) in enumerate(zip(runs, found, strict=True))
        if points
    ]
    what = f"{title}, nats a token, over {unit}" + (" trained" if axis == "time" else "")
    height = max(300, charts.LABEL_HEIGHT * len(series) + 40)
    return charts.chart(what, series, 920, height, from_zero=False, named=True, whole=False)


def _panel(runs: Sequence[Run], key: str, title: str, from_zero: bool) -> charts.Chart | None:
    """A small chart of a column of the metrics over the steps."""
    found = [(i, charts.column(run.metrics, key)) for i, run in enumerate(runs)]
    series = [charts.Series(_css(i), "", points) for i, points in found if points]
    return charts.chart(title, series, 448, 150, from_zero=from_zero, named=False) if series else None
