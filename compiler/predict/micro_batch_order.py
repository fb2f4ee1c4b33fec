"""Which micro-batch of a step goes where in its schedule, where documents make them cost differently.

What a micro-batch costs is known when its samples are: a sequence of short documents has little attention. The plan
knows how much that can be: all of attention, whose share of a step's FLOPs is counted. So the order is searched for
costs that lie evenly between none of attention and all of it, and says of each position the rank of its micro-batch
among those of the step. The runtime ranks them (runtime/step/micro_batches.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from compiler.ir import Plan
from compiler.predict.flops import flops_per_token
from compiler.predict.prediction import OrderGain
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import copy_time, costs_of_searches
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import has_copies, simulate
from dsl.schema import Spec
from runtime.contract.names import ProgramName

if TYPE_CHECKING:
    from runtime.data.permutation import Numbers
    from runtime.data.samples import AnySamples


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


def micro_batch_orders(
    spec: Spec, lowering: Lowering, schedules: Mapping[ProgramName, Schedule]
) -> dict[ProgramName, tuple[int, ...]]:
    """By program, the rank of the micro-batch at each position, the cheapest being 0; none where they go as drawn."""
    trained = {name: each for name, each in schedules.items() if name.trains}
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


# --- What `order = cost` saves of the first steps of a run, from the text that was prepared for it
#
# A step is drawn from the text as the run draws it. Its micro-batches take what the plan says, less what the documents
# of their sequences leave out of attention, and are run once as drawn and once by the order of the plan (ADR 42). Where
# experts lie on several data ranks these wait for each other, so a position takes what its dearest micro-batch takes.

_STEPS = 8  # the first ones of the largest batch
_GROUPS = 8  # of data ranks that wait for each other, looked at


def gain_on(samples: AnySamples, spec: Spec, lowering: Lowering, schedule: Schedule, data: str) -> OrderGain:
    """The gain on the first steps of some samples."""
    import numpy as np

    from runtime.data.order import put_by_cost

    costs, share, batch = costs_of_orders(lowering, schedule), attention_share(lowering), spec.train.batch.end
    order = order_of(lowering, schedule, costs)
    drawn: list[float] = []
    ordered: list[float] = []
    for step in range(_STEPS):
        drawn_ids = np.arange(step * batch, (step + 1) * batch)
        ordered_ids = put_by_cost(drawn_ids, samples.seen(drawn_ids), order)
        for ids, times in ((drawn_ids, drawn), (ordered_ids, ordered)):
            weights = _weights(samples.seen(ids), spec, lowering.plan, share)
            times.append(max(_milliseconds(schedule, costs, each) for each in weights))
    return OrderGain(sum(drawn) / _STEPS / 1000, sum(ordered) / _STEPS / 1000, _STEPS, data)


def _weights(seen: Numbers, spec: Spec, plan: Plan, share: float) -> Numbers:
    """[group, micro-batch]: by position, what the dearest micro-batch of each group of data ranks costs."""
    mesh, size, sequence = plan.mesh, spec.train.micro_batch, spec.train.sequence
    together = max(1, mesh.expert_group // (mesh.cp * mesh.tp)) if mesh.ep > 1 else 1
    most = size * (sequence * (sequence + 1) // 2)
    by_rank = seen.reshape(-1, mesh.dp, size).sum(2)
    dearest = by_rank.reshape(len(by_rank), -1, together).max(2).T[:_GROUPS]
    weights: Numbers = 1 - share + share * dearest / most
    return weights


def _milliseconds(schedule: Schedule, costs: Costs, weights: Sequence[float]) -> float:
    parts = tuple(Fraction(max(1, round(1000 * each)), 1000) for each in weights)
    return float(simulate(schedule, replace(costs, micro_batches=parts)).makespan)
