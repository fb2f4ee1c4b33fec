"""The order in which the ranks of a plan open their channels: one list for all ranks.

A common list cannot hang: the ranks of the first channel that is not open yet have nothing to do before it. Channels
whose pipeline ranks are disjoint open at the same time, so the list is sorted into rounds of disjoint channels. The
edges of a pipeline of any length are open after about four rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from compiler.ir import Plan, Program
from runtime.contract import Opening
from runtime.contract.mesh import word_of


def edges(programs: Iterable[Program]) -> tuple[tuple[int, int], ...]:
    """The (source, destination) pipeline ranks between which any of the programs sends messages."""
    pairs = {
        (rank, i.peer)
        for program in programs
        for rank, bodies in enumerate(program.bodies)
        for body in bodies
        for _, i in body.messages
        if i.kind == "send" and i.peer != rank
    }
    return tuple(sorted(pairs))


def opening_order(plan: Plan, programs: Iterable[Program]) -> tuple[Opening, ...]:
    """Every channel that the programs of a plan use, in the order in which ranks open them."""
    return tuple(_order_in_rounds([*_needed_channels(plan, programs)]))


def _needed_channels(plan: Plan, programs: Iterable[Program]) -> Iterator[Opening]:
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
    """Channels of an expert group: one over the group, or across and inside nodes where tokens are forwarded."""
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
    """Channels that reduce and gather buckets.

    A sharded bucket has one on each pipeline rank, and one for the copies of a shard, in several groups of columns or
    on several pipeline ranks. With zero = 2 it has one more, which gathers whole weights after the update.
    """
    for bucket in (bucket for bucket in plan.buckets if not bucket.is_still):
        holders = bucket.holders
        groups = [bucket.sharing(rank) for rank in holders.pipeline_ranks] if bucket.sites else [holders]
        if bucket.sites and bucket.is_reduced:
            groups += [bucket.keepers, *([holders] if plan.zero == 2 else [])]
        for group in groups:
            if len(group) > 1:
                word = word_of(group.columns, plan.mesh)
                assert word is not None
                yield Opening("reduce", group.pipeline_ranks, word)


def _order_in_rounds(openings: Sequence[Opening]) -> Iterator[Opening]:
    """The channels in rounds: each takes the first channel that is left, and all that are disjoint from those taken."""
    waiting = list(openings)
    while waiting:
        busy_ranks: set[int] = set()
        later: list[Opening] = []
        for opening in waiting:
            if busy_ranks.isdisjoint(opening.ranks):
                busy_ranks.update(opening.ranks)
                yield opening
            else:
                later.append(opening)
        waiting = later
