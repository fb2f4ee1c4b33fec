"""Geometry against the values it is drawn from."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.tools.report import charts
from compiler.tools.report.page import memory_rows, placement_rows
from compiler.tools.report.sections import RankRow, Report
from tests.compiler.tools.report.conftest import make_report, make_run

# ---------------------------------------------------------------- placement and memory


def test_mirrored_stages_stand_in_the_column_of_their_direction() -> None:
    rows = placement_rows(make_report("dualpipe", 4, 8))
    assert [[stage.index if stage else None for stage in row.stages] for row in rows] == [
        [0, 3],
        [1, 2],
        [2, 1],
        [3, 0],
    ]


def test_several_stages_of_a_rank_stand_side_by_side(report: Report) -> None:
    stages = tuple(replace(report.stages[0], index=s, ranks=(s % 2,)) for s in range(4))
    ranks = tuple(RankRow(r, (r, r), (r, r + 2), 1, ()) for r in range(2))
    rows = placement_rows(replace(report, stages=stages, ranks=ranks))
    assert [[stage.index if stage else None for stage in row.stages] for row in rows] == [[0, 2], [1, 3]]


def test_bars_are_in_proportion(report: Report) -> None:
    ranks = (
        RankRow(0, (0, 0), (0,), 1, (("parameters", 30), ("moments", 60))),
        RankRow(1, (1, 1), (1,), 1, (("parameters", 20), ("activations", 100))),
    )
    memory = memory_rows(replace(report, ranks=ranks))
    assert [kind for _, kind in memory.kinds] == ["parameters", "moments", "activations"]
    assert memory.amounts == ((30, 60, 0), (20, 0, 100)) and [row.total for row in memory.rows] == [90, 120]
    assert memory.rows[0].parts == (("m0", "0.00", "25.00"), ("m1", "25.00", "50.00"))
    assert memory.rows[1].parts == (("m0", "0.00", "16.67"), ("m2", "16.67", "83.33"))


# ---------------------------------------------------------------- curves


def test_columns_keep_finite_numbers_only() -> None:
    rows: list[dict[str, object]] = [
        {"step": 1, "loss": 2.5},
        {"step": 2},
        {"step": 3, "loss": None},
        {"step": 4, "loss": math.nan},
    ]
    rows += [{"step": 5, "loss": True}, {"step": 6, "loss": "<b>"}, {"step": 7, "loss": 2}]
    assert charts.column(rows, "loss") == ((1.0, 2.5), (7.0, 2.0))


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=400), st.floats(0.5, 20))
def test_curves_stay_inside_and_lose_no_spike(values: list[float], unigram: float) -> None:
    metrics = [{"step": i + 1, "loss": value} for i, value in enumerate(values)]
    chart = charts.loss_chart(metrics, unigram)
    assert chart is not None
    points = [tuple(map(float, pair.split())) for pair in chart.curves[0].path[1:].split("L")]
    assert all(chart.left - 0.1 <= x <= chart.right + 0.1 and 0 <= y <= chart.bottom + 0.1 for x, y in points)
    assert all(0 <= y <= chart.bottom for y, _ in chart.y_ticks)
    (level,) = {float(pair.split()[1]) for pair in chart.curves[-1].path[1:].split("L")}
    pixels = sorted([y for _, y in points] + [level])
    spread = sorted([*values, unigram])
    if spread[-1] - spread[0] > 1e-6:  # the plot fits its values
        assert pixels[-1] - pixels[0] == pytest.approx((chart.bottom - charts.TOP) / 1.12, abs=0.2)
    labels = sorted(curve.label_y for curve in chart.curves)
    assert all(b - a > charts.LABEL_HEIGHT - 1e-6 for a, b in itertools.pairwise(labels))


def test_thinning_keeps_extremes_of_every_column() -> None:
    points = [(i / 1000, math.sin(i * 0.37) * (1 + i % 7)) for i in range(20_000)]
    thin = charts.thin_curve(points)
    assert len(thin) <= 4 * 21 and set(thin) <= set(points)
    for column in range(20):
        column_values = [y for x, y in points if int(x) == column]
        thinned_values = [y for x, y in thin if int(x) == column]
        assert (max(column_values), min(column_values)) == (max(thinned_values), min(thinned_values))
    assert charts.thin_curve(points[:1]) == tuple(points[:1])


def test_no_losses_no_chart() -> None:
    assert charts.loss_chart([{"step": 1}], 6.0) is None
    assert charts.panels([]) == ()
    assert [panel.title for panel in charts.panels([{"step": 1, "grad_norm": 0.5}])] == [
        "Gradient norm, before clipping"
    ]


def test_load_is_relative_to_the_mean_of_its_layer() -> None:
    load_grid = charts.load_map([[10, 30, 20, 20], [0, 0, 0, 400]], ("L1",))
    assert load_grid is not None
    assert [(cell.css, cell.strength) for cell in load_grid.cells] == [
        *(("under", "0.50"), ("over", "0.50"), ("under", "0.00"), ("under", "0.00")),
        *(("under", "1.00"), ("under", "1.00"), ("under", "1.00"), ("over", "1.00")),
    ]
    assert [row[1:] for row in load_grid.rows] == [("L1", "0.50 – 1.50"), ("row 1", "0.00 – 4.00")]
    assert load_grid.cells[1].title == "L1, expert 1: 30 tokens, 1.50 of the mean"
    assert charts.load_map([], ()) is None and charts.load_map([[0, 0]], ("L1",)) is None


def test_the_figures_of_the_example_are_all_there() -> None:
    run = make_run()
    chart = charts.loss_chart(run.metrics, 6.5687)
    assert chart is not None and [curve.css for curve in chart.curves] == ["training", "validation", "unigram"]
    assert len(chart.curves[1].dots) == 12 and len(charts.panels(run.metrics)) == 5
