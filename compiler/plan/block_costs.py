"""Times of the blocks of a model on the devices that may run them: what `balance` splits by.

Where a schedule overlaps pairs of micro-batches, compute and exchanges go on at the same time, each on its lane: of a
rank the fuller lane counts. Elsewhere an action runs alone, with what it hides of its own exchanges.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from compiler import ir
from compiler.machine.rates import Rates
from compiler.plan.actions.chains import Chains
from compiler.plan.actions.lanes import best_order, end_of
from compiler.plan.actions.order import jobs_of
from compiler.plan.blocks import CutModel
from compiler.plan.layer_runs import Blocks, Cost


def chains_of(rates: Rates, model: CutModel) -> tuple[Chains, ...]:
    """Each block as a stage of its own, on one kind of device. Blocks that differ in names alone share the first's."""
    found: dict[Hashable, Chains] = {}
    chains: dict[int, Chains] = {}
    for block in {id(block): block for block in model.blocks}.values():
        key = tuple(
            (step.segment.key if isinstance(step, ir.Use) else (step.kind, step.sizes[0].shape), step.again)
            for step in block.steps
        )
        if key not in found:
            found[key] = Chains(ir.Stage(0, block.steps, (), None, None, (), ()), model.cuts, rates)
        chains[id(block)] = found[key]
    return tuple(chains[id(block)] for block in model.blocks)


def blocks_of(chains: Sequence[Chains], overlaps: bool) -> Blocks:
    """Nanoseconds of the blocks of a model, forward and backward.

    Equal load of the experts is assumed: every rank receives as many rows as it sends.
    """
    costs = {id(each): _cost(each, overlaps) for each in {id(each): each for each in chains}.values()}
    first, *layers, last = (costs[id(each)] for each in chains)
    return Blocks(tuple(layers), first, last)


def _cost(chains: Chains, overlaps: bool) -> Cost:
    nodes = [chains.of(kind) for kind in "FB"]
    if not overlaps:
        jobs = [jobs_of([chain]) for chain in nodes]
        return (sum(end_of(each, best_order(each)) for each in jobs),)
    lanes = [[node.time_ns for chain in nodes for node in chain if node.exchanges == lane] for lane in (False, True)]
    return sum(lanes[0]), sum(lanes[1])
