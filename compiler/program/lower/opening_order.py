"""The order in which the channels of a plan's ranks are opened: one list, for all ranks.

A list cannot hang: of the channels that are not open yet, the ranks of the first one have nothing before it. Rows whose
pipeline ranks are disjoint are opened at the same time, so rows are put in rounds of disjoint ones: a pipeline of any
length has all its edges open after some four rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from compiler.ir import Plan, Program
from compiler.ir.holders import Holders
from runtime.contract import Opening
from runtime.contract.mesh import Columns


def edges(programs: Iterable[Program]) -> tuple[tuple[int, int], ...]:
    """The ordered pairs of pipeline ranks that talk in any of the programs."""
    found = {
        (rank, i.peer)
        for program in programs
        for rank, bodies in enumerate(program.bodies)
        for body in bodies
        for _, i in body.messages
        if i.kind == "send" and i.peer != rank
    }
    return tuple(sorted(found))


def opening_order(plan: Plan, programs: Iterable[Program]) -> tuple[Opening, ...]:
    """Every channel that the programs of a plan use, in the order in which all ranks open them."""
    return tuple(_in_rounds([*_needed(plan, programs)]))


def _needed(plan: Plan, programs: Iterable[Program]) -> Iterator[Opening]:
    mesh = plan.mesh
    for edge in edges(programs):
        yield Opening("edge", edge, "each")
    if mesh.expert_group > 1:
        for rank in range(mesh.pp):
            yield from _of_experts(plan, rank)
    if mesh.tp > 1:
        for rank in range(mesh.pp):
            yield Opening("tensor", (rank,), "tensor")
    if mesh.cp > 1:
        for rank in range(mesh.pp):
            yield Opening("context", (rank,), "context")
    if mesh.sq > 1:
        for rank in range(mesh.pp):
            yield Opening("choices", (rank,), "sequence")
    yield from dict.fromkeys(_of_holders(plan))
    if mesh.world > 1:
        yield Opening("world", tuple(range(mesh.pp)), "all")


def _of_experts(plan: Plan, rank: int) -> Iterator[Opening]:
    """Exchanges of expert groups: of all ranks, or where tokens go through nodes, across these and inside each."""
    if not plan.mesh.node:
        yield Opening("counts", (rank,), "block")
        yield Opening("expert", (rank,), "block")
        return
    yield Opening("counts", (rank,), "across")
    yield Opening("expert", (rank,), "across")
    if plan.mesh.node > 1:
        yield Opening("counts", (rank,), "node")
        yield Opening("expert", (rank,), "node")


def _of_holders(plan: Plan) -> Iterator[Opening]:
    """Sums and gathers of each bucket. Of a divided one: of what each pipeline rank has, and of the same parts on
    several of them; after the update, of whole weights (zero = 2)."""
    for bucket in (each for each in plan.buckets if not each.still):
        holders = bucket.holders
        groups = [holders.on(rank) for rank in holders.pipeline_ranks] if bucket.sites else [holders]
        if bucket.sites and bucket.is_reduced:
            groups += [holders.at(holders.columns.start), *([holders] if plan.zero == 2 else [])]
        for each in groups:
            if len(each) > 1:
                yield Opening("reduce", each.pipeline_ranks, _columns(plan, each))


def _columns(plan: Plan, holders: Holders) -> Columns:
    """All columns, one, those that have the same experts, or those at one place of their expert or tensor groups."""
    every, held = plan.mesh.columns, len(holders.columns)
    if held in (1, every):
        return "all" if held == every else "each"
    if holders.columns[1] - holders.columns[0] == 1:
        return "experts"
    return "slice" if plan.mesh.tp > 1 and held * plan.mesh.tp == every else "member"


def _in_rounds(openings: Sequence[Opening]) -> Iterator[Opening]:
    """The rows in rounds: each has the first row that is left, and all further ones that are disjoint from it."""
    left = list(openings)
    while left:
        taken: set[int] = set()
        later: list[Opening] = []
        for opening in left:
            if taken.isdisjoint(opening.ranks):
                taken.update(opening.ranks)
                yield opening
            else:
                later.append(opening)
        left = later
