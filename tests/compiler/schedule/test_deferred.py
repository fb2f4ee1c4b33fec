"""Schedules that defer fewer weight gradients: legal, complete, and no fuller at any moment than before."""

from __future__ import annotations

from collections import Counter

import pytest

from compiler.ir.stage_placement import ONE_STAGE
from compiler.schedule import SCHEDULES, schedule_of_block
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule, max_deferred_gradients
from compiler.schedule.simulate import simulate
from dsl.schema import ScheduleBlock
from runtime.contract.actions import Action, actions_of, parse_step

SPLIT = [name for name, row in SCHEDULES.items() if max_deferred_gradients(row.generate(4, 12)) > 1]


def counted(schedule: Schedule) -> list[Counter[Action]]:
    return [Counter(action for step in steps for action in actions_of(step)) for steps in schedule.actions]


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("name", SPLIT)
def test_a_rank_defers_no_more_than_it_may(name: str, most: int) -> None:
    """The actions stay, and so does their order apart from weight gradients, which run earlier."""
    unlimited = SCHEDULES[name].generate(4, 12)
    fewer = unlimited.deferring_at_most(most)
    fewer.check()
    assert max_deferred_gradients(fewer) == min(most, max_deferred_gradients(unlimited))
    assert counted(fewer) == counted(unlimited)
    for before, after in zip(unlimited.actions, fewer.actions, strict=True):
        other_steps = [[step for step in steps if "W" not in str(step)] for steps in (before, after)]
        assert other_steps[0] == other_steps[1]
        for action in {action for step in before for action in actions_of(step) if action.kind == "W"}:
            index_before, index_after = (
                [action in actions_of(step) for step in steps].index(True) for steps in (before, after)
            )
            extra_gradients = sum("W" in str(step) for step in after[:index_after]) - sum(
                "W" in str(step) for step in before[:index_before]
            )
            assert index_after - extra_gradients <= index_before
    peaks = [simulate(schedule, Costs()).peak_activations for schedule in (fewer, unlimited)]
    assert all(map(float.__le__, *([float(peak) for peak in peaks_of] for peaks_of in peaks)))


@pytest.mark.parametrize("name", SPLIT)
def test_a_limit_that_is_not_reached_changes_nothing(name: str) -> None:
    unlimited = SCHEDULES[name].generate(4, 12)
    assert (
        unlimited.deferring_at_most(max_deferred_gradients(unlimited)) == unlimited.deferring_at_most(None) == unlimited
    )


def test_a_weight_gradient_in_a_pair_runs_once() -> None:
    """A pair whose weight gradient has run early keeps its other action."""
    steps = map(parse_step, ("F0.0", "F0.1", "I0.0", "I0.1", "F0.2", "(B0.2|W0.0)", "W0.1"))
    schedule = Schedule("paired", 1, 3, ONE_STAGE, (tuple(steps),))
    assert [*map(str, schedule.deferring_at_most(1).actions[0])] == [
        "F0.0",
        "F0.1",
        "I0.0",
        "I0.1",
        "W0.0",
        "F0.2",
        "B0.2",
        "W0.1",
    ]
    assert schedule.deferring_at_most(2) == schedule


def test_a_spec_limits_its_schedule() -> None:
    block = ScheduleBlock(name="dualpipe", deferred=2)
    assert (
        max_deferred_gradients(schedule_of_block(block, 8, 20))
        == 2
        < max_deferred_gradients(schedule_of_block(ScheduleBlock(name="dualpipe"), 8, 20))
    )
