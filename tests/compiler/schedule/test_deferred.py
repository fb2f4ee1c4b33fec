"""Schedules that defer fewer weight gradients: legal, complete, and no fuller at any moment than before."""

from __future__ import annotations

from collections import Counter

import pytest

from compiler.schedule import SCHEDULES, schedule_of_block
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule, most_deferred
from compiler.schedule.simulate import simulate
from dsl.schema import ScheduleBlock
from runtime.contract.actions import Action, actions_of

SPLIT = [name for name, row in SCHEDULES.items() if most_deferred(row.generate(4, 12)) > 1]


def counted(schedule: Schedule) -> list[Counter[Action]]:
    return [Counter(action for step in steps for action in actions_of(step)) for steps in schedule.actions]


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("name", SPLIT)
def test_a_rank_defers_no_more_than_it_may(name: str, most: int) -> None:
    """The actions stay, and so does their order apart from weight gradients, which run earlier."""
    whole = SCHEDULES[name].generate(4, 12)
    fewer = whole.deferring_at_most(most)
    fewer.check()
    assert most_deferred(fewer) == min(most, most_deferred(whole))
    assert counted(fewer) == counted(whole)
    for before, after in zip(whole.actions, fewer.actions, strict=True):
        left = [[step for step in steps if "W" not in str(step)] for steps in (before, after)]
        assert left[0] == left[1]
        for action in {action for step in before for action in actions_of(step) if action.kind == "W"}:
            place, then = ([action in actions_of(step) for step in steps].index(True) for steps in (before, after))
            others = sum("W" in str(step) for step in after[:then]) - sum("W" in str(step) for step in before[:place])
            assert then - others <= place
    peaks = [simulate(each, Costs()).peak_activations for each in (fewer, whole)]
    assert all(map(float.__le__, *([float(peak) for peak in peaks_of] for peaks_of in peaks)))


@pytest.mark.parametrize("name", SPLIT)
def test_a_limit_that_is_not_reached_changes_nothing(name: str) -> None:
    whole = SCHEDULES[name].generate(4, 12)
    assert whole.deferring_at_most(most_deferred(whole)) == whole.deferring_at_most(None) == whole


def test_a_spec_limits_its_schedule() -> None:
    block = ScheduleBlock(name="dualpipe", deferred=2)
    assert (
        most_deferred(schedule_of_block(block, 8, 20))
        == 2
        < most_deferred(schedule_of_block(ScheduleBlock(name="dualpipe"), 8, 20))
    )
