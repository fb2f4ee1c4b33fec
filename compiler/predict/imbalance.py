"""What uneven loads of expert ranks cost: steps in which the fullest rank of each layer receives more than the mean.

All ranks of an exchange wait for the fullest one, so its rows decide the time of the layer on all of them. If tokens
choose experts evenly and independently, its load is close to 1; real routers differ from that, and `dsc watch` shows by
how much.
"""

from __future__ import annotations

from compiler.plan.actions.order import Orders, jobs_of
from compiler.predict.predict import time_schedule
from compiler.predict.prediction import LoadEffect
from compiler.predict.timed_plan import TimedPlan
from compiler.predict.times import StepRuns
from compiler.program.lower import Lowering
from dsl.closed_forms.loads import load_by_chance
from dsl.schema import Moe
from runtime.contract.actions import is_copy

QUANTILES = (0.5, 0.99)  # of the fullest rank's load, if tokens choose evenly and independently
LOADS = (1.25, 1.5, 2.0)


def load_effects(timed: TimedPlan) -> tuple[LoadEffect, ...]:
    """The step at several loads of the fullest expert rank, in ascending order; empty without expert ranks."""
    spec = timed.spec
    if spec.parallel.expert_group == 1 or not any(isinstance(layers.ffn, Moe) for layers in spec.model.layers):
        return ()
    by_chance = {quantile: load_by_chance(spec, quantile) for quantile in QUANTILES}
    effects = [LoadEffect(load, _step_s(timed, load), quantile) for quantile, load in by_chance.items()]
    most = max(by_chance.values())
    return (*effects, *(LoadEffect(load, _step_s(timed, load)) for load in LOADS if load > most))


def _step_s(timed: TimedPlan, load: float) -> float:
    """The step at a load, with the instructions in the order that is compiled for even loads."""
    base = timed.lowering
    loaded = Lowering(timed.plan, [rates.with_load(load) for rates in timed.rates], base.orders)
    even, uneven = (StepRuns(of, timed.schedule, lambda chains, _: jobs_of(chains)) for of in (base, loaded))
    orders = {
        uneven.of(step, rank): base.orders.best(even.of(step, rank))
        for rank, row in enumerate(timed.schedule.actions)
        for step in row
        if not is_copy(step)
    }
    loaded.orders = Orders(found=orders)
    return time_schedule(timed.spec, loaded, timed.schedule).step.seconds
