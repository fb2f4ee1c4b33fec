"""A lower bound of a step's time for any split of its layers over stages.

The pipeline ranks share the work of every micro-batch, so the busiest rank has at least the mean. An action takes at
least the time of each of its lanes, and of the hidden state's path through its blocks, on which compute and exchanges
wait for each other. Overlapped actions take at least the time of each lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiler.ir.names import gradient_of
from compiler.machine.rates import Rates
from compiler.plan.actions.chains import ChainNode
from compiler.plan.actions.order import jobs_of
from compiler.plan.blocks import CutModel, chains_of
from compiler.plan.spec_rates import rank_rates
from dsl.closed_forms import ramp
from dsl.closed_forms.stages import may_overlap

NS = 10**9
Work = tuple[int, int, int]  # nanoseconds of compute, of exchanges, and of the longest path


def least_step_s(model: CutModel) -> float:
    """A lower bound of the seconds of a step of the largest batch, on the devices of the model's spec."""
    spec = model.spec
    kinds = list({id(rates): rates for rates in rank_rates(spec)}.values())
    on_kinds = [_works(rates, model) for rates in kinds]
    forward, backward = (
        [sum(min(works[kind][index][k] for works in on_kinds) for index in range(len(model.blocks))) for k in range(3)]
        for kind in "FB"
    )
    if may_overlap(spec.schedule):
        lanes = max(forward[0] + backward[0], forward[1] + backward[1])
        micro_batch_ns = lanes * min(1.0, *(rates.pair for rates in kinds))
    else:
        micro_batch_ns = max(forward) + max(backward)
    return ramp.micro_batches(spec)[-1] * micro_batch_ns / spec.parallel.pipeline / NS


def _works(rates: Rates, model: CutModel) -> Mapping[str, Sequence[Work]]:
    """The work of each block of a model in a forward and in a backward, on one kind of device."""
    work_of: dict[tuple[int, str], Work] = {}
    result: dict[str, list[Work]] = {"F": [], "B": []}
    before = ""
    for block, shared in zip(model.blocks, chains_of(rates, model), strict=True):
        for kind, works in result.items():
            if (id(shared), kind) not in work_of:
                ends = (before, block.output) if kind == "F" else (gradient_of(block.output), gradient_of(before))
                work_of[id(shared), kind] = _work(shared.chain(kind), *ends)
            works.append(work_of[id(shared), kind])
        before = block.output
    return result


def _work(nodes: Sequence[ChainNode], source: str, target: str) -> Work:
    """The work of a chain. Its longest path leads from nodes that read `source` to nodes that write `target`."""
    jobs, ordered = jobs_of([nodes]), [node for node in nodes if node.uses_lane]
    path_times: list[int | None] = []
    for node, time, earlier in zip(ordered, jobs.least, jobs.after, strict=True):
        before = [path_time for path_time in (path_times[index] for index in earlier) if path_time is not None]
        reads = [0] if source in node.instruction.reads else []
        path_times.append(max((*before, *reads)) + time if before or reads else None)
    makes = [
        path_time or 0
        for node, path_time in zip(ordered, path_times, strict=True)
        if any(b.name == target for b in node.writes)
    ]
    return jobs.total(exchange=False), jobs.total(exchange=True), max(makes, default=0)
