"""The geometry of a run's curves and of the map of its expert load."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.tools.picture import labels

Points = tuple[tuple[float, float], ...]
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 10.0, 22.0  # margins in pixels
REWARD_COLOURS = 7  # colours of reward curves in style.css
LARGEST = 1e100  # larger numbers are not drawn
LABEL_WIDTH, LABEL_HEIGHT = 128.0, 15.0  # of the name at the end of a curve
# Columns of metrics.jsonl: (key, title, whether the axis begins at 0).
PANELS = (
    ("completion_tokens", "Tokens per completion", True),
    ("entropy", "Entropy of the sampling distribution, nats", True),
    ("policy_kl", "Divergence from the weights that generated, nats per token", True),
    ("reference_kl", "Divergence from the initial weights, nats per token", True),
    ("clipped", "Share of tokens whose ratio is clipped", True),
    ("completion_longest", "Share of completions of the maximum length", True),
    ("tokens_per_s", "Tokens per second", True),
    ("grad_norm", "Gradient norm, before clipping", True),
    ("rate", "Learning rate", True),
    ("imbalance", "Load of the busiest expert, over the mean", False),
    ("mtp_loss", "Loss of multi-token prediction, nats per token", False),
    ("sequence_loss", "Sequence balance loss", True),
    ("index_loss", "Loss of the indexers, nats per token", True),
)


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """A curve, or a point if it has only one. `dots`: whether to mark its points."""

    css: str
    name: str
    points: Points
    dots: bool = False


@dataclass(frozen=True, slots=True)
class ChartCurve:
    css: str
    path: str
    dots: tuple[tuple[float, float], ...]
    name: str
    label_y: float


@dataclass(frozen=True)
class Chart:
    """A chart in pixels. `x_ticks`, `y_ticks`: (position, label)."""

    title: str
    width: float
    height: float
    left: float
    right: float  # edges of the plot
    bottom: float
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    curves: tuple[ChartCurve, ...]


# ---------------------------------------------------------------- curves


def column(metrics: Iterable[Mapping[str, Any]], key: str) -> Points:
    """Return (step, value) of the rows that have a finite number under `key`."""
    return tuple(
        (float(row["step"]), float(row[key]))
        for row in metrics
        if _is_number(row.get("step")) and _is_number(row.get(key))
    )


def _is_number(value: object) -> bool:
    """Whether a value can be drawn: a number, not NaN and not too large for a coordinate."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def loss_chart(metrics: Sequence[Mapping[str, Any]], unigram_nats: float | None) -> Chart | None:
    """Draw the training and validation loss of the main head by step, with the unigram cross-entropy as a level.
    Returns None for a run that learns from rewards, whose loss says nothing."""
    training, validation = column(metrics, "loss"), column(metrics, "validation_loss")
    if not training or column(metrics, "reward"):
        return None
    series = [ChartSeries("training", f"training {training[-1][1]:.2f}", training)]
    if validation:
        series.append(ChartSeries("validation", f"validation {validation[-1][1]:.2f}", validation, dots=True))
    if unigram_nats is not None:
        level = ((training[0][0], unigram_nats), (training[-1][0], unigram_nats))
        series.append(ChartSeries("unigram", f"unigram {unigram_nats:.2f}", level))
    return chart("Loss, nats per token", series, 920, 300, from_zero=False, named=True)


def reward_chart(metrics: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Draw the reward by step, and each of its parts if there are several. Returns None for a run without rewards."""
    if not (total := column(metrics, "reward")):
        return None
    rows = [row for row in metrics if isinstance(row.get("rewards"), Mapping)]
    flat = [{"step": row.get("step"), **row["rewards"]} for row in rows]
    names = dict.fromkeys(str(name) for row in rows for name in row["rewards"])
    parts = [(f"r{1 + index % REWARD_COLOURS}", name, column(flat, name)) for index, name in enumerate(names)]
    series = [ChartSeries("training", f"reward {total[-1][1]:.2f}", total)]
    series += [
        ChartSeries(css, f"{name} {points[-1][1]:.2f}", points)
        for css, name, points in parts
        if points and len(parts) > 1
    ]
    return chart("Reward", series, 920, 300, from_zero=False, named=True)


def panels(metrics: Sequence[Mapping[str, Any]]) -> tuple[Chart, ...]:
    """Draw a small chart for each metrics column of PANELS that the run has."""
    columns = [(title, column(metrics, key), from_zero) for key, title, from_zero in PANELS]
    if column(metrics, "reward"):
        columns.append(("Policy loss", column(metrics, "loss"), False))
    return tuple(
        chart(title, [ChartSeries("plain", "", points)], 448, 150, from_zero=from_zero, named=False)
        for title, points, from_zero in columns
        if points
    )


def chart(
    title: str,
    series: Sequence[ChartSeries],
    width: float,
    height: float,
    from_zero: bool,
    named: bool,
    whole_steps: bool = True,
) -> Chart:
    """Draw all series on common axes, with steps on the x axis.

    `named`: write the name of a series at its right end. `whole_steps`: label only whole numbers on the x axis.
    """
    left, right = LEFT, width - (LABEL_WIDTH if named else RIGHT)
    top, bottom = TOP, height - BOTTOM
    x_low, x_high = _range([x for s in series for x, _ in s.points])
    y_low, y_high = _range([y for s in series for _, y in s.points] + [0.0] * from_zero)
    margin = (y_high - y_low) * 0.06
    y_low, y_high = (y_low if from_zero and y_low == 0 else y_low - margin), y_high + margin

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = point
        return (
            left + (x - x_low) / (x_high - x_low) * (right - left),
            bottom - (y - y_low) / (y_high - y_low) * (bottom - top),
        )

    x_marks, x_step = labels.ticks(x_low, x_high, max(2, int((right - left) / 80)))
    y_marks, y_step = labels.ticks(y_low, y_high, max(4, int((bottom - top) / 34)))
    placed = [thin_curve([place(point) for point in s.points]) for s in series]
    ends = _spread([points[-1][1] for points in placed], bottom)
    return Chart(
        title=title,
        width=width,
        height=height,
        left=left,
        right=right,
        bottom=bottom,
        x_ticks=tuple(
            (place((x, y_low))[0], labels.tick(x, max(1, x_step) if whole_steps else x_step))
            for x in x_marks
            if x_step >= 1 or not whole_steps or x == int(x)
        ),
        y_ticks=tuple((place((x_low, y))[1], labels.tick(y, y_step)) for y in y_marks),
        curves=tuple(
            ChartCurve(s.css, _path(points), points if s.dots and len(points) <= 60 else (), s.name, end)
            for s, points, end in zip(series, placed, ends, strict=True)
        ),
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the greatest value, moved apart if they are nearly equal."""
    low, high = min(values), max(values)
    if high - low > 1e-12 * max(1.0, abs(high)):
        return low, high
    return low - max(abs(low), 1.0) * 0.5, high + max(abs(high), 1.0) * 0.5


def thin_curve(points: Sequence[tuple[float, float]]) -> Points:
    """Keep the first, lowest, highest and last point of each pixel column, which draw the same curve."""
    columns: dict[int, list[int]] = {}
    for i, (x, _) in enumerate(points):
        columns.setdefault(int(x), []).append(i)
    drawn = {
        i
        for ids in columns.values()
        for i in (ids[0], min(ids, key=lambda j: points[j][1]), max(ids, key=lambda j: points[j][1]), ids[-1])
    }
    return tuple(points[i] for i in sorted(drawn))


def _path(points: Points) -> str:
    return "M" + "L".join(f"{labels.px(x)} {labels.px(y)}" for x, y in points)


def _spread(heights: Sequence[float], bottom: float) -> tuple[float, ...]:
    """Return label positions near the ends of their curves, without overlap."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = dict.fromkeys(order, 0.0)
    least = TOP
    for i in order:
        placed[i] = max(least, heights[i])
        least = placed[i] + LABEL_HEIGHT
    excess = max(0.0, least - LABEL_HEIGHT - bottom)
    return tuple(placed[i] - excess for i in range(len(heights)))


# ---------------------------------------------------------------- expert load


@dataclass(frozen=True, slots=True)
class Load:
    """A cell. `css`: "over" or "under" the mean; `strength`: from 0 at the mean to 1 at no tokens or twice the mean."""

    x: float
    y: float
    css: str
    strength: str
    title: str


@dataclass(frozen=True)
class LoadMap:
    width: float
    height: float
    cell_width: float
    cell_height: float
    left: float
    right: float  # edges of the cells
    cells: tuple[Load, ...]
    rows: tuple[tuple[float, str, str], ...]  # (y of the middle, layer, least and greatest load over the mean)
    ticks: tuple[tuple[float, str], ...]


def load_map(load: Sequence[Sequence[float]], names: Sequence[str]) -> LoadMap | None:
    """Draw a row per MoE layer and a column per expert, coloured by the expert's tokens over the layer's mean.

    Returns None if a layer has no tokens. A row without a name, as in the load of another build, gets its number.
    """
    if not load or not load[0] or not all(sum(row) > 0 for row in load):
        return None
    left, right, bottom = 64.0, 84.0, 20.0
    width = 920.0
    columns = max(map(len, load))
    cell_width, cell_height = min(26.0, (width - left - right) / columns), 20.0
    cells: list[Load] = []
    rows = []
    for i, row in enumerate(load):
        name = names[i] if i < len(names) else f"row {i}"
        shares = [tokens / statistics.fmean(row) for tokens in row]
        y = i * (cell_height + 2)
        rows.append((y + cell_height / 2, name, f"{min(shares):.2f} – {max(shares):.2f}"))
        for expert, share in enumerate(shares):
            cells.append(
                Load(
                    x=left + expert * cell_width,
                    y=y,
                    css="over" if share > 1 else "under",
                    strength=f"{min(1.0, abs(share - 1)):.2f}",
                    title=f"{name}, expert {expert}: {row[expert]:,.0f} tokens, {share:.2f} of the mean",
                )
            )
    marks, step = labels.ticks(0, max(1, columns - 1), 9)
    return LoadMap(
        width=left + columns * cell_width + right,
        height=len(load) * (cell_height + 2) + bottom,
        cell_width=cell_width,
        cell_height=cell_height,
        left=left,
        right=left + columns * cell_width,
        cells=tuple(cells),
        rows=tuple(rows),
        ticks=tuple(
            (left + (mark + 0.5) * cell_width, labels.tick(mark, max(1, step)))
            for mark in marks
            if mark == int(mark) < columns
        ),
    )
