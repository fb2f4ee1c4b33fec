"""Pictures of real schedules, and a browser to look at them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest

from compiler.schedule import SCHEDULES
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import simulate
from compiler.tools.picture.drawing import Panel, Picture
from compiler.tools.picture.panel import panel_of, picture_of_measurement
from compiler.tools.picture.recorded import measure
from tests.compiler.tools.picture.browser import Browser
from tests.compiler.tools.picture.browser import browser as running

COSTS = Costs(pairs=(("BF", Fraction(5, 2)),))
SIZES = [("dualpipe", 2, 4), ("dualpipe", 4, 10), ("dualpipe", 8, 20), ("1f1b", 1, 3), ("1f1b", 4, 6), ("zbv", 3, 7)]


def schedule_of(name: str, P: int, N: int) -> Schedule:
    return SCHEDULES[name].generate(P, N)


def make_panel(name: str = "dualpipe", P: int = 4, N: int = 10, costs: Costs = COSTS) -> Panel:
    panel = panel_of(schedule_of(name, P, N), costs)
    return replace(panel, facts=(("step", f"{panel.makespan:g}"), ("idle", f"{panel.idle:.1%}")))


def make_picture(*sizes: tuple[str, int, int], costs: Costs = COSTS) -> Picture:
    panels = tuple(make_panel(*size, costs) for size in sizes or (("dualpipe", 4, 10),))
    return Picture("schedules", "forwards of a stage", panels)


def trace_lines(
    schedule: Schedule, costs: Costs, factor: float = 1.0, steps: int = 3
) -> list[dict[int, dict[str, object]]]:
    """A trace of a run whose every action takes `factor` of its cost in ms, one data rank, clocks that start late."""
    timeline = simulate(schedule, costs)
    ranks = []
    for steps_of_rank, spans in zip(schedule.actions, timeline.spans, strict=True):
        lines: dict[int, dict[str, object]] = {}
        for step in range(1, steps + 1):
            begin = 10_000_000 * step
            actions = [
                [str(action), begin + round(float(start) * 1000 * factor), begin + round(float(end) * 1000 * factor)]
                for action, (start, end) in zip(steps_of_rank, spans, strict=True)
            ]
            lines[step] = {"step": step, "program": f"train_{schedule.num_micro_batches}", "actions": actions}
        ranks.append(lines)
    return ranks


def make_measured(factor: float = 1.25) -> Picture:
    schedule = schedule_of("dualpipe", 4, 10)
    measured = measure(schedule, trace_lines(schedule, COSTS, factor), "train_10")
    return picture_of_measurement("a run", schedule, COSTS, measured, "a table")


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running(tmp_path_factory.mktemp("profile")) as running_browser:
        yield running_browser
