"""The order of a step's micro-batches in its schedule, if their documents make them differ in cost.

The cost of a micro-batch is known once its samples are drawn: a sequence of short documents has little attention. The
plan knows only the range: from no attention to full attention, whose share of a step's FLOPs is counted. The search
assumes costs that are evenly spaced over this range. Its result gives, for each position in the schedule, the rank of
its micro-batch when those of the step are sorted by cost. The runtime sorts them (runtime/step/micro_batches.py).
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


_EFFORT = 0.1  # of the search for the largest batch, a second or two; smaller batches take the best starting order


def weights_between(share: float, count: int) -> tuple[Fraction, ...]:
    """Ascending weights of `count` micro-batches, evenly spaced from 1 - `share` to 1 and rounded to a thousandth."""
    least, gap = 1 - share, share / max(1, count - 1)
    return tuple(Fraction(max(1, round(1000 * (least + gap * k))), 1000) for k in range(count))


def attention_share(lowering: Lowering) -> float:
    """The share of a step's FLOPs that is in the attention core."""
    plan = lowering.plan
    flops = flops_per_token([step for stage in plan.stages for step in stage.steps], 1)
    return (flops.full - flops.causal) / flops.causal


def micro_batch_orders(
    spec: Spec, lowering: Lowering, schedules: Mapping[ProgramName, Schedule]
) -> dict[ProgramName, tuple[int, ...]]:
    """By program, the rank by cost of the micro-batch at each position, the cheapest being 0.

    Empty unless the spec orders micro-batches by cost.
    """
    trained = {name: schedule for name, schedule in schedules.items() if name.trains}
    if spec.schedule.order != "cost":
        return {}
    costs = costs_of_orders(lowering, *trained.values())
    largest = max(schedule.num_micro_batches for schedule in trained.values())
    return {
        name: order_of(lowering, schedule, costs, _EFFORT if schedule.num_micro_batches == largest else 0.0)
        for name, schedule in trained.items()
    }


def costs_of_orders(lowering: Lowering, *schedules: Schedule) -> Costs:
    """Costs for the search of orders: those of the plan's actions, and of host copies if a schedule has any."""
    copy = copy_time(lowering) if any(map(has_copies, schedules)) else None
    return replace(costs_of_searches(lowering), O=copy, R=copy)


def order_of(lowering: Lowering, schedule: Schedule, costs: Costs, effort: float = _EFFORT) -> tuple[int, ...]:
    """For each position of a training schedule, the rank by cost of its micro-batch, the cheapest being 0."""
    if schedule.num_ranks == 1:  # the order does not matter on one rank
        return tuple(range(schedule.num_micro_batches))
    from compiler.schedule.order import best_order  # imports numpy

    weights = weights_between(attention_share(lowering), schedule.num_micro_batches)
    return tuple(best_order(schedule, replace(costs, micro_batches=weights), effort))


# --- The time that `order = cost` saves in the first steps of a run, from the text that was prepared for it
#
# Steps are drawn from the text as the run draws them. A micro-batch takes the planned time, less the attention that the
# documents of its sequences leave out. Each step is simulated once in the order drawn and once in the planned order
# (ADR 42). Data ranks that share experts wait for each other, so a position takes as long as their costliest
# micro-batch.

_STEPS = 8  # how many steps are simulated, the first ones of the largest batch
_GROUPS = 8  # how many groups of data ranks that wait for each other are simulated


def gain_on(samples: AnySamples, spec: Spec, lowering: Lowering, schedule: Schedule, data: str) -> OrderGain:
    """The time of the first steps of `samples`, as drawn and in the planned order; `data` names their folder."""
    import numpy as np

    from runtime.data.order import put_by_cost

    costs, share, batch = costs_of_orders(lowering, schedule), attention_share(lowering), spec.train.batch.end
    order = order_of(lowering, schedule, costs)
    drawn: list[float] = []
    ordered: list[float] = []
    for step in range(_STEPS):
        drawn_ids = np.arange(step * batch, (step + 1) * batch)
        ordered_ids = put_by_cost(drawn_ids, samples.causal_pairs(drawn_ids), order)
        for ids, times in ((drawn_ids, drawn), (ordered_ids, ordered)):
            weights = _weights(samples.causal_pairs(ids), spec, lowering.plan, share)
            times.append(max(_milliseconds(schedule, costs, row) for row in weights))
    return OrderGain(sum(drawn) / _STEPS / 1000, sum(ordered) / _STEPS / 1000, _STEPS, data)


def _weights(attention_pairs: Numbers, spec: Spec, plan: Plan, share: float) -> Numbers:
    """Weights [group, position]: of the costliest micro-batch in each group of data ranks that wait for each other."""
    mesh, size, sequence = plan.mesh, spec.train.micro_batch, spec.train.sequence
    together = max(1, mesh.expert_group // (mesh.cp * mesh.tp)) if mesh.ep > 1 else 1
    all_pairs = size * (sequence * (sequence + 1) // 2)
    by_rank = attention_pairs.reshape(-1, mesh.dp, size).sum(2)
    dearest = by_rank.reshape(len(by_rank), -1, together).max(2).T[:_GROUPS]
    weights: Numbers = 1 - share + share * dearest / all_pairs
    return weights


def _milliseconds(schedule: Schedule, costs: Costs, weights: Sequence[float]) -> float:
    parts = tuple(Fraction(max(1, round(1000 * weight)), 1000) for weight in weights)
    return float(simulate(schedule, replace(costs, micro_batches=parts)).makespan)
