"""The parts of step times: as shares in a picture, compared with the plan, and as numbers of a run."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from compiler.emit.build_files import watch_json
from compiler.predict.failures import Goodput
from compiler.predict.planned_step import PlannedStep
from compiler.predict.prediction import Flops, GenerationTime
from compiler.tools.report.diagrams import view_of
from compiler.tools.report.lost_time import LostTime
from compiler.tools.report.page import report_html
from compiler.tools.report.sections import Report
from compiler.tools.report.summary import (
    BOTTOM,
    MOST_BARS,
    PARTS,
    TOP,
    parts_chart,
    planned_parts,
    seconds_of_parts,
    summary_of,
)
from dsl.load import load
from runtime.step.step_time import PARTS as RUN_PARTS
from tests.compiler.cli.forms import FORMS, faults
from tests.compiler.tools.report.conftest import SPECS

HALF = {"compute": 0.5, "message": 0.2, "exchange": 0.1, "sum": 0.15, "data": 0.05}


def rows(num_steps: int, parts: dict[str, float] | None = None) -> tuple[dict[str, object], ...]:
    draw = random.Random(3)
    shares = parts or {part: draw.random() for part in RUN_PARTS}
    return tuple(
        {"step": step, "tokens": step * 2048, "tokens_per_s": 2048.0, "step_s": 1.0, "spent_s": shares}
        for step in range(1, num_steps + 1)
    )


def test_every_part_of_a_row_is_drawn_and_named() -> None:
    assert {*RUN_PARTS} == {part for part, *_ in PARTS} - {"lost"}


@pytest.mark.parametrize("num_steps", [1, 7, MOST_BARS, MOST_BARS + 1, 1234])
def test_bars_have_the_shares_of_their_steps(num_steps: int, quickstart_plan: PlannedStep) -> None:
    """All bars are as high, no two parts overlap, and each part has its share of the height."""
    measured = rows(num_steps)
    chart = parts_chart(measured, {}, quickstart_plan)
    assert chart is not None and chart.has_plan
    bars: dict[float, list[float]] = {}
    for block in chart.blocks:
        bars.setdefault(round(block.x, 3), []).append(block.height)
    assert 2 <= len(bars) <= MOST_BARS + 1
    for heights in bars.values():
        assert sum(heights) == pytest.approx(BOTTOM - TOP, abs=0.2)
    first = [block for block in chart.blocks if block.x == chart.blocks[0].x]
    total = sum(measured[0]["spent_s"].values())  # type: ignore[attr-defined]
    expected = [measured[0]["spent_s"][part] / total for part in RUN_PARTS]  # type: ignore[index]
    assert [block.height / (BOTTOM - TOP) for block in first] == pytest.approx(expected, abs=1e-3)
    for below, above in pairwise(first):
        assert above.y + above.height == pytest.approx(below.y)


def test_time_lost_by_failures_stands_at_its_step() -> None:
    chart = parts_chart(rows(4, {"compute": 1.0}), {3: 3.0}, None)
    assert chart is not None and not chart.has_plan
    (lost,) = (block for block in chart.blocks if "lost by failures" in block.title)
    assert lost.title.startswith("step 3, ") and lost.title.endswith("75.0%")
    assert [name for _, name in chart.legend] == ["compute", "lost by failures"]


def test_missing_and_damaged_parts_are_left_out() -> None:
    assert parts_chart(({"step": 1},), {}, None) is None
    damaged = ({"step": 1, "spent_s": 3}, {"step": 2, "spent_s": {"compute": "long", "data": -1, "sum": 1e300}})
    assert seconds_of_parts(damaged) == {"compute": 0.0, "sum": 0.0, "data": 0.0}
    assert parts_chart(damaged, {}, None) is not None


def test_planned_parts_sum_to_the_planned_step(quickstart_plan: PlannedStep) -> None:
    step = quickstart_plan.step
    seconds = planned_parts(quickstart_plan)
    assert sum(seconds.values()) == pytest.approx(step.seconds)
    idle = replace(step, mean=replace(step.mean, bubble_s=0.25))
    assert planned_parts(replace(quickstart_plan, step=idle)) == seconds | {"message": 0.25}
    assert seconds["compute"] > seconds["exchange"] >= 0


def test_completions_are_a_part_of_the_planned_step(quickstart_plan: PlannedStep) -> None:
    """A run that learns from rewards spends time on completions, in each step and in the planned one."""
    writing = GenerationTime(seconds=3.0, rounds=24, round_s=0.1, slots=8, tokens=192, cache_bytes=1, fits=True)
    planned = replace(quickstart_plan, generation=writing)
    assert planned_parts(planned) == planned_parts(quickstart_plan) | {"generation": 3.0}
    assert planned.seconds == pytest.approx(sum(planned_parts(planned).values()))
    chart = parts_chart(rows(1, {"compute": 1.0, "generation": 3.0}), {}, planned)
    assert chart is not None
    (block,) = (block for block in chart.blocks if block.title.startswith("planned, generation"))
    assert block.height == pytest.approx((BOTTOM - TOP) * 3 / planned.seconds)
    view, forecast = view_of(planned), watch_json(load(SPECS / "quickstart.dsc"), planned)
    assert view.generation_s == "3.000 s" and json.loads(forecast)["step_s"] == pytest.approx(planned.seconds, rel=1e-5)


def test_the_forecast_of_a_step_includes_completions(quickstart_plan: PlannedStep) -> None:
    """The forecast bubble and MFU of a watched run are shares of a step that includes completions."""
    step = quickstart_plan.step
    writing = GenerationTime(
        seconds=3 * step.seconds, rounds=1, round_s=1.0, slots=1, tokens=1, cache_bytes=1, fits=True
    )
    idle = replace(step, mean=replace(step.mean, bubble_s=step.seconds / 2))
    alone = replace(quickstart_plan, step=idle, mfu=Flops(causal=0.4, full=0.5))
    for planned, share in ((alone, 1.0), (replace(alone, generation=writing), 0.25)):
        forecast = json.loads(watch_json(load(SPECS / "quickstart.dsc"), planned))
        shares = {"bubble": 0.5 * share, "mfu": 0.4 * share, "step_s": step.seconds / share}
        assert {name: forecast[name] for name in shares} == pytest.approx(shares, rel=1e-5)


def summarised(report: Report, planned: PlannedStep) -> Report:
    assert report.run is not None
    lost = LostTime(10.0, 8.0, 0.0, 1.5, 0.5)
    goodput = Goodput(1e5, 1.0, 2.0, 600.0, 100, 0.98, 0.97, 10**9)
    plan = replace(planned, goodput=goodput, mfu=Flops(causal=0.4, full=0.5))
    return replace(report, planned=plan, run=replace(report.run, metrics=rows(8, HALF), lost=lost))


def test_watched_numbers_of_a_run_have_a_description(report_of_run: Report, quickstart_plan: PlannedStep) -> None:
    report = summarised(report_of_run, quickstart_plan)
    summary = summary_of(report)
    assert summary is not None
    document = {"version": 1, "run": "r", "report": "r/report.html", **summary.to_json()}
    assert faults(document, FORMS["report"]) == []
    assert document["goodput"] == 0.8 and document["lost_s"]["checkpoint"] == 1.5
    assert document["mfu"] == pytest.approx(0.4 * 2048 / quickstart_plan.step.tokens_per_second)
    assert document["spent_s"] == pytest.approx({part: 8 * value for part, value in HALF.items()})
    assert list(summary.lines()) == [
        f"speed: 8 steps, 2,048 tokens/s, MFU {document['mfu']:.1%}",
        "time: compute 50.0%, exposed communication 45.0% (messages 20.0%, exchanges 10.0%, sums 15.0%), data 5.0%",
        "goodput: 80.0% of 10.0 s; planned 97.0% with failures",
        "time lost: checkpoints 1.5 s, restarts 0.5 s",
    ]


def test_the_page_has_the_picture(report_of_run: Report, quickstart_plan: PlannedStep) -> None:
    page = report_html(summarised(report_of_run, quickstart_plan))
    assert "Where the time went" in page and "planned 97.0% with failures" in page
    assert "steps 1, compute" not in page and "step 1, compute: 500" in page
    assert "Where the time went" not in report_html(report_of_run)
    empty = replace(report_of_run, run=replace(report_of_run.run, metrics=()))  # type: ignore[type-var]
    nothing = summary_of(empty)
    assert nothing is not None and list(nothing.lines()) == [] and faults(nothing.to_json()["spent_s"], {}) == []
