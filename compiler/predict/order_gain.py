"""What `order = cost` saves of the first steps of a run, from the text that was prepared for it.

A step is drawn from the text as the run draws it. Its micro-batches take what the plan says, less what the documents of
their sequences leave out of attention, and are run once as drawn and once by the order of the plan (ADR 42). Where
experts lie on several data ranks these wait for each other, so a position takes what its dearest micro-batch takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from compiler.ir import Plan
from compiler.predict.micro_batch_order import attention_share, costs_of_orders, order_of
from compiler.predict.prediction import OrderGain
from compiler.program.lower import Lowering
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import simulate
from dsl.schema import Spec

if TYPE_CHECKING:
    from runtime.data.permutation import Numbers
    from runtime.data.samples import AnySamples

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
