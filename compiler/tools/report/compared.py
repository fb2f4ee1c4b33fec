"""A comparison of runs: the results of each, and the differences of their specs. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from compiler.predict.prediction import span
from compiler.tools.difference import difference
from compiler.tools.picture import labels, palette
from compiler.tools.picture.template import environment
from compiler.tools.report import charts
from compiler.tools.report.charts import Points, column
from compiler.tools.report.long_metrics import Rows, drawn_rows, steps_of_starts, typical
from compiler.tools.report.lost_time import LostTime, lost_time, seconds_of_row
from compiler.tools.report.run_page import events_of, rows_before_resumes
from dsl.load import ResolvedSpec, resolve
from dsl.messages.diagnostics import SpecError

LAST_STEPS = 10  # a training loss is the mean of the last 10 steps, since one step is noisy
ABSENT = "—"


@dataclass(frozen=True)
class ComparedRun:
    """A run folder: the rows of its metrics, where its time went, and its spec, or None if it is unreadable."""

    name: str  # the shortest end of its path that identifies it among the runs
    folder: Path
    metrics: Rows
    damaged: int  # lines of metrics.jsonl that are no rows
    lost: LostTime | None
    spec: ResolvedSpec | None


@dataclass(frozen=True)
class Figures:
    """The results of a run; None where its rows lack them. Losses are in nats per token, times in seconds."""

    steps: int
    tokens: int | None
    loss: float | None  # of the main head, mean of the last steps
    loss_at: float | None  # the same, of the last steps up to `common_tokens`
    validation_loss: float | None
    tokens_per_s: float | None  # median
    trained_s: float  # of the steps that were not trained again
    goodput: float | None


@dataclass(frozen=True)
class KeyDifference:
    """A key whose value differs between specs: its value in each run, ABSENT if a spec does not have it."""

    path: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class RunComparison:
    """Runs, their results, and the differences of their specs. `common_tokens`: tokens that all runs have trained on,
    None if a run does not record tokens. `unread`: names of the runs without a readable spec."""

    runs: tuple[ComparedRun, ...]
    figures: tuple[Figures, ...]
    common_tokens: int | None
    differences: tuple[KeyDifference, ...]
    unread: tuple[str, ...]


def read_run(folder: Path, name: str) -> ComparedRun:
    """Read a run folder. Raises TextFileError if metrics.jsonl cannot be read, ValueError if it has no step."""
    events = events_of(folder)
    metrics, damaged = drawn_rows(folder / "metrics.jsonl", steps_of_starts(events))
    if not metrics:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no step")
    try:
        spec = resolve(str(folder / "spec.resolved"))
    except (OSError, ValueError, SpecError):
        spec = None
    lost = lost_time(metrics, rows_before_resumes(folder), events) if events else None
    return ComparedRun(name, folder, metrics, damaged, lost, spec)


def compare(runs: Sequence[ComparedRun]) -> RunComparison:
    """Compare runs. Pure."""
    totals = [_last_value(column(run.metrics, "tokens")) for run in runs]
    common = min(int(total) for total in totals if total is not None) if None not in totals else None
    return RunComparison(
        runs=tuple(runs),
        figures=tuple(_figures(run, common) for run in runs),
        common_tokens=common,
        differences=_differences(runs),
        unread=tuple(run.name for run in runs if run.spec is None),
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path that identifies it among `folders`, which must differ."""
    parts = [folder.absolute().parts for folder in folders]
    return [
        next(
            "/".join(path[-size:])
            for size in range(1, len(path) + 1)
            if sum(other[-size:] == path[-size:] for other in parts) == 1 or size == len(path)
        )
        for path in parts
    ]


def points_over(metrics: Sequence[Mapping[str, Any]], key: str, axis: str) -> Points:
    """Return the values of `key` over the tokens trained on (`axis` = "tokens") or the seconds trained ("time")."""
    rows, seconds = [], 0.0
    for row in metrics:
        seconds += seconds_of_row(row)
        rows.append({**row, "step": row.get("tokens") if axis == "tokens" else seconds})
    return column(rows, key)


def _figures(run: ComparedRun, common_tokens: int | None) -> Figures:
    tokens, speed = column(run.metrics, "tokens"), column(typical(run.metrics), "tokens_per_s")
    steps = {step for step, num_tokens in tokens if common_tokens is not None and num_tokens <= common_tokens}
    rows = [row for row in run.metrics if row["step"] in steps]
    last = _last_value(tokens)
    return Figures(
        steps=run.metrics[-1]["step"],
        tokens=None if last is None else int(last),
        loss=_mean(column(run.metrics, "loss")),
        loss_at=_mean(column(rows, "loss")),
        validation_loss=_last_value(column(run.metrics, "validation_loss")),
        tokens_per_s=statistics.median(value for _, value in speed) if speed else None,
        trained_s=points_over([*run.metrics, {"x": 0}], "x", "time")[-1][0],
        goodput=run.lost.goodput if run.lost else None,
    )


def _last_value(points: Points) -> float | None:
    return points[-1][1] if points else None


def _mean(points: Points) -> float | None:
    return statistics.fmean(value for _, value in points[-LAST_STEPS:]) if points else None


def _differences(runs: Sequence[ComparedRun]) -> tuple[KeyDifference, ...]:
    """Return the keys in which any run differs from the first run with a spec, in the order of the schema."""
    read = [(i, run.spec) for i, run in enumerate(runs) if run.spec is not None]
    if len(read) < 2:
        return ()
    first = read[0][1]
    changes = {i: {change.path: change for change in difference(first, spec).values} for i, spec in read[1:]}
    paths = dict.fromkeys(path for run_changes in changes.values() for path in run_changes)
    differences = []
    for path in paths:
        base = next(run_changes[path].before for run_changes in changes.values() if path in run_changes) or ABSENT
        values = [ABSENT] * len(runs)
        for i, _ in read:
            change = changes.get(i, {}).get(path)
            values[i] = base if change is None else change.after or ABSENT
        differences.append(KeyDifference(path, tuple(values)))
    return tuple(differences)


# --- `dsc compare --format html`: the comparison as one page, without scripts or external resources

FOLDER = Path(__file__).parent
COLOURS = 8  # of runs, in style.css; further runs reuse them, dashed
NAME = 20  # maximum characters of a name beside its curve
SCALES = ((1e9, "billion tokens"), (1e6, "million tokens"), (1e3, "thousand tokens"), (1, "tokens"))
TIMES = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
HEADS = ("steps", "tokens", "loss", "loss at equal tokens", "validation", "tokens per second", "trained for", "goodput")


@dataclass(frozen=True)
class ComparisonView:
    """The values of the template. `heads` and the rows of `table` leave out empty columns of HEADS."""

    runs: tuple[tuple[str, str, str], ...]  # css class, name, folder
    heads: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    equal_tokens: str
    loss: tuple[charts.Chart, ...]
    panels: tuple[charts.Chart, ...]
    differences: tuple[tuple[str, tuple[tuple[str, bool], ...]], ...]  # key; by run its text, and whether it differs
    notes: tuple[str, ...]


def compare_html(compared: RunComparison, title: str = "Runs compared") -> str:
    """Return the page. Pure: equal values give equal bytes, and every text is escaped."""
    # The style is safe: it contains nothing of the runs.
    style = Markup(palette.css(with_series=True) + (FOLDER / "style.css").read_text("utf-8"))
    template = environment(FOLDER).get_template("compare.html.j2")
    return template.render(view=view_of(compared), style=style, title=title)


def view_of(compared: RunComparison) -> ComparisonView:
    """Return curves, table and differences."""
    runs = compared.runs
    cells = [cells_of(figures) for figures in compared.figures]
    columns = [i for i in range(len(HEADS)) if any(row[i] != ABSENT for row in cells)]
    panels = [_panel(runs, key, title, from_zero) for key, title, from_zero in charts.PANELS]
    return ComparisonView(
        runs=tuple((_css(i), run.name, str(run.folder)) for i, run in enumerate(runs)),
        heads=tuple(HEADS[i] for i in columns),
        table=tuple(tuple(row[i] for i in columns) for row in cells),
        equal_tokens=labels.count(compared.common_tokens) if compared.common_tokens is not None else "",
        loss=tuple(
            chart
            for key, title in (("loss", "Training loss"), ("validation_loss", "Validation loss"))
            for axis in ("tokens", "time")
            if (chart := _curves(runs, key, title, axis)) is not None
        ),
        panels=tuple(panel for panel in panels if panel is not None),
        differences=tuple(
            (entry.path, tuple((text, text != entry.values[0]) for text in entry.values))
            for entry in compared.differences
        ),
        notes=notes_of(compared),
    )


def cells_of(figures: Figures) -> tuple[str, ...]:
    """Return the cells of a run, one for each of HEADS."""
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


def notes_of(compared: RunComparison) -> tuple[str, ...]:
    """Return warnings about run folders."""
    notes = [
        f"{name}: its spec.resolved is missing or damaged, so its keys are not compared" for name in compared.unread
    ]
    for run in compared.runs:
        if run.damaged:
            notes.append(f"{run.name}: {run.damaged:,} damaged lines of metrics.jsonl are left out")
    return tuple(notes)


def _css(index: int) -> str:
    return f"r{index % COLOURS}" + " again" * (index >= COLOURS)


def _shorten_name(name: str) -> str:
    return name if len(name) <= NAME else "…" + name[1 - NAME :]


def _curves(runs: Sequence[ComparedRun], key: str, title: str, axis: str) -> charts.Chart | None:
    """Draw `key` of all runs over tokens or time, in the largest unit in which the longest curve reaches 1."""
    curves = [points_over(run.metrics, key, axis) for run in runs]
    longest = max((points[-1][0] for points in curves if points), default=0.0)
    if longest <= 0:
        return None
    scale, unit = next((pair for pair in (SCALES if axis == "tokens" else TIMES) if longest >= pair[0]), (1, "seconds"))
    series = [
        charts.ChartSeries(
            _css(i), _shorten_name(run.name), tuple((x / scale, y) for x, y in points), dots=key != "loss"
        )
        for i, (run, points) in enumerate(zip(runs, curves, strict=True))
        if points
    ]
    heading = f"{title}, nats per token, over {unit}" + (" trained" if axis == "time" else "")
    height = max(300, charts.LABEL_HEIGHT * len(series) + 40)
    return charts.chart(heading, series, 920, height, from_zero=False, named=True, whole_steps=False)


def _panel(runs: Sequence[ComparedRun], key: str, title: str, from_zero: bool) -> charts.Chart | None:
    """Draw a small chart of a metrics column by step."""
    curves = [(i, charts.column(run.metrics, key)) for i, run in enumerate(runs)]
    series = [charts.ChartSeries(_css(i), "", points) for i, points in curves if points]
    return charts.chart(title, series, 448, 150, from_zero=from_zero, named=False) if series else None
