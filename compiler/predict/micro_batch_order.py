"""Which micro-batch of a step goes where in its schedule, where documents make them cost differently.

What a micro-batch costs is known when its samples are: a sequence of short documents has little attention. The plan
knows how much that can be: all of attention, whose share of a step's FLOPs is counted. So the order is searched for
costs that lie evenly between none of attention and all of it, and says of each position the rank of its micro-batch
among those of the step. The runtime ranks them (runtime/step/micro_batches.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from compiler.predict.flops import flops_per_token
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import copy_time, costs_of_searches
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import has_copies
from dsl.schema import Spec

_EFFORT = 0.1  # of the search for the largest batch: a second or two; others take the best of its starts


def weights_between(share: float, count: int) -> tuple[Fraction, ...]:
    """Weights of micro-batches, ascending: evenly from all but this share of a step to all of it, to a thousandth."""
    least, gap = 1 - share, share / max(1, count - 1)
    return tuple(Fraction(max(1, round(1000 * (least + gap * k))), 1000) for k in range(count))


def attention_share(lowering: Lowering) -> float:
    """The attention core's part of the FLOPs of a step."""
    plan = lowering.plan
    flops = flops_per_token([step for stage in plan.stages for step in stage.steps], 1)
    return (flops.full - flops.causal) / flops.causal


def micro_batch_orders(spec: Spec, lowering: Lowering, schedules: Mapping[str, Schedule]) -> dict[str, tuple[int, ...]]:
    """By program, the rank of the micro-batch at each position, the cheapest being 0; none where they go as drawn."""
    trained = {name: each for name, each in schedules.items() if name.startswith("train")}
    if spec.schedule.order != "cost":
        return {}
    costs = costs_of_orders(lowering, *trained.values())
    largest = max(each.num_micro_batches for each in trained.values())
    return {
        name: order_of(lowering, schedule, costs, _EFFORT if schedule.num_micro_batches == largest else 0.0)
        for name, schedule in trained.items()
    }


def costs_of_orders(lowering: Lowering, *schedules: Schedule) -> Costs:
    """Costs of the plan's actions, and of the copies of schedules that have some, by which orders are searched."""
    copy = copy_time(lowering) if any(map(has_copies, schedules)) else None
    return replace(costs_of_searches(lowering), O=copy, R=copy)


def order_of(lowering: Lowering, schedule: Schedule, costs: Costs, effort: float = _EFFORT) -> tuple[int, ...]:
    """At each position of a schedule that trains, the rank of its micro-batch, the cheapest being 0."""
    if schedule.num_ranks == 1:  # one rank takes as long in any order
        return tuple(range(schedule.num_micro_batches))
    from compiler.schedule.order import best_order  # it brings numpy

    weights = weights_between(attention_share(lowering), schedule.num_micro_batches)
    return tuple(best_order(schedule, replace(costs, micro_batches=weights), effort))
