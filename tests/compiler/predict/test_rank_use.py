"""How the busiest rank uses its lanes: the parts sum to its time, and each exchange belongs to its ranks."""

from __future__ import annotations

import pytest

from compiler.plan.split_blocks import balanced_rows
from compiler.predict.predict import time_plan
from compiler.predict.rank_use import class_seconds, use_of
from compiler.predict.timed_plan import TimedPlan
from dsl.load import resolve
from tests.specs.shipped import path_of

PLANS = {  # spec, overrides, axes
    "experts": ("moe-8gpu", (), {"experts", "data"}),
    "tensor": ("llama3-8b", ("parallel.tensor=2",), {"tensor", "data", "pipeline"}),
    "context": ("llama3-8b", ("parallel.context=2",), {"context", "data", "pipeline"}),
    "sharded": ("llama3-8b", ("parallel.zero=3", "parallel.pipeline=1"), {"data"}),
    "pairs": ("deepseek-v3", (), {"experts", "data", "pipeline"}),
    "cores": ("quickstart", (), {"experts", "data", "pipeline"}),
}


def timed(name: str) -> TimedPlan:
    spec, overrides, _ = PLANS[name]
    return time_plan(resolve(path_of(spec), overrides=overrides).spec)


@pytest.mark.parametrize("name", PLANS)
def test_compute_and_exposed_exchanges_sum_to_the_time_of_the_actions(name: str) -> None:
    plan = timed(name)
    use = use_of(plan)
    rank, tail = plan.step.ranks[use.pp_rank], plan.tails[use.pp_rank]
    assert {axis.axis for axis in use.axes} == PLANS[name][2]
    assert rank.busy_s == max(other.busy_s for other in plan.step.ranks)
    assert all(0 <= axis.exposed_s <= axis.busy_s * (1 + 1e-12) for axis in use.axes)
    exposed_s = sum(axis.exposed_s for axis in use.axes) - tail.reduction_s - tail.gather_s
    compute_s = plan.times.compute_s(plan.schedule.actions[use.pp_rank], use.pp_rank)
    # The factor of a pair is on all of its time.
    assert compute_s + exposed_s == pytest.approx(rank.busy_s, rel=plan.rates[0].pair - 1 + 1e-6)


@pytest.mark.parametrize("name", PLANS)
def test_the_time_follows_exchanges_as_far_as_the_slopes_say(name: str) -> None:
    """What is exposed grows with its exchange, and no action grows by more than all of it."""
    use = use_of(timed(name))
    for axis in use.axes:
        assert axis.exposed_s * (1 - 1e-9) <= axis.slope_s * 1.2 and axis.slope_s <= axis.busy_s * 1.01, axis
    assert sum(axis.slope_s for axis in use.axes) < use.seconds
    of_axis = {axis.axis: axis for axis in use.axes}
    assert name != "sharded" or of_axis["data"].slope_s < 0.2 * of_axis["data"].busy_s, "gathers are hidden"
    assert name != "pairs" or of_axis["experts"].slope_s > 1.5 * of_axis["experts"].exposed_s, "they barely fit"


@pytest.mark.parametrize("name", [*PLANS, "recomputed"])
def test_classes_sum_to_the_compute_of_the_actions(name: str) -> None:
    """With recomputed forwards, and with the SMs that each action has."""
    plan = (
        time_plan(resolve(path_of("llama3-8b"), overrides=["recompute=[layer]"]).spec)
        if name == "recomputed"
        else timed(name)
    )
    use = use_of(plan)
    compute_s = plan.times.compute_s(plan.schedule.actions[use.pp_rank], use.pp_rank)
    assert sum(time.seconds for time in use.classes.values()) == pytest.approx(
        compute_s, rel=plan.rates[0].pair - 1 + 1e-6
    )
    assert list(use.classes) == sorted(use.classes, key=lambda kind: -use.classes[kind].seconds)
    assert all(0 <= time.guessed <= 1 + 1e-12 for time in use.classes.values())


def test_classes_without_exchanges_are_those_of_the_stages() -> None:
    plan = time_plan(resolve(path_of("llama3-8b"), overrides=["parallel.zero=0"]).spec)
    use, rows = use_of(plan), balanced_rows(plan.spec)
    (stage,) = plan.plan.stages_of(use.pp_rank)
    of_stage = class_seconds(plan.plan.stages[stage], plan.plan.cuts, plan.rates[0], rows)
    for kind, time in use.classes.items():
        planned_s = of_stage[kind] * plan.schedule.num_micro_batches * plan.slowdown
        assert time.seconds == pytest.approx(planned_s, rel=1e-4), kind
