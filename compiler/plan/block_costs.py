"""What the blocks of a model take on the devices that may run them: what `balance` splits by.

Where a schedule overlaps pairs of micro-batches, compute and exchanges go on at the same time, each on its lane: of a
rank the fuller lane counts. Elsewhere an action runs alone, with what it hides of its own exchanges.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any, Protocol

from compiler import ir
from compiler.lower.chains import Chains
from compiler.lower.lanes import best_order, end_of
from compiler.lower.order import jobs_of
from compiler.plan.layer_runs import Blocks, Cost
from compiler.rates import Rates
from compiler.segments.interpret import cut

Cuts = MutableMapping[Any, ir.Cut]  # by the key of a segment: made once for all who ask


class Steps(Protocol):
    """Of a block: see compiler/plan/stages.py."""

    @property
    def steps(self) -> tuple[ir.Use | ir.Communication, ...]: ...


def cut_of(segment: ir.Segment, cuts: Cuts) -> ir.Cut:
    """The cut of a segment, remembered in `cuts`."""
    key = segment.key
    if key not in cuts:
        cuts[key] = cut(segment)
    return cuts[key]


def chains_of(rates: Rates, blocks: Sequence[Steps], cuts: Cuts) -> tuple[Chains, ...]:
    """Each block as a stage of its own, on one kind of device. Blocks that differ in names alone share the first's."""
    known: dict[Hashable, Chains] = {}
    result = []
    for block in blocks:
        key = tuple(
            step.segment.key if isinstance(step, ir.Use) else (step.kind, step.sizes[0].shape) for step in block.steps
        )
        if key not in known:
            made = {step.site: cut_of(step.segment, cuts) for step in block.steps if isinstance(step, ir.Use)}
            known[key] = Chains(ir.Stage(0, block.steps, (), None, None, (), ()), made, rates, -1, -1)
        result.append(known[key])
    return tuple(result)


def blocks_of(chains: Sequence[Chains], overlaps: bool) -> Blocks:
    """Nanoseconds of the blocks of a model, forward and backward.

    Equal load of the experts is assumed: every rank receives as many rows as it sends.
    """
    known = {id(each): each for each in chains}
    costs = {key: _cost(each, overlaps) for key, each in known.items()}
    first, *layers, last = (costs[id(each)] for each in chains)
    return Blocks(tuple(layers), first, last)


def _cost(chains: Chains, overlaps: bool) -> Cost:
    nodes = [chains.of(kind) for kind in "FB"]
    if not overlaps:
        jobs = [jobs_of([chain]) for chain in nodes]
        return (sum(end_of(each, best_order(each)) for each in jobs),)
    lanes = [[node.time_ns for chain in nodes for node in chain if node.exchanges == lane] for lane in (False, True)]
    return sum(lanes[0]), sum(lanes[1])
