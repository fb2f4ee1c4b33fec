"""Sixth pass, over start-up: every channel that the programs use is opened before the first step, and no rank hangs.

The model is that of a first use which holds the host of every rank of the channel until all have come, as NCCL makes a
communicator. Rank lines are straight and name their channels, so one maximal run decides every interleaving, as in the
second pass. Once all channels are open no first use is left, and the steps run as the second pass has proven them.

Opening is by pipeline ranks: each data rank of one does the same at the same place of its line, and the channels of a
row have no rank in common. So a row is a meeting of pipeline ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from compiler.ir import Bucket, Plan, Program
from compiler.ir.holders import Holders
from compiler.program.proof.certificate import ProofError
from runtime.contract import Opening

Line = Sequence[Opening]  # what a pipeline rank opens, in its order


def check_start(plan: Plan, openings: Sequence[Opening], programs: Iterable[Program]) -> None:
    """Raise ProofError unless the openings are those that the programs of a plan need, and no rank hangs."""
    ranks = range(plan.mesh.pp)
    for opening in openings:
        if not opening.ranks or not set(opening.ranks) <= set(ranks):
            raise ProofError(f"{name_of(opening)}: there is no such rank")
    check_lines([[o for o in openings if rank in o.ranks] for rank in ranks], used(plan, programs))


def check_lines(lines: Sequence[Line], needed: Iterable[Opening]) -> None:
    """Raise ProofError unless each rank opens every channel that it needs once, and no other, and none waits for ever.

    `lines`: of each pipeline rank.
    """
    wanted = set(needed)
    for rank, line in enumerate(lines):
        expected, counts = {opening for opening in wanted if rank in opening.ranks}, Counter(line)
        for opening in sorted(expected | counts.keys()):
            if opening not in expected:
                raise ProofError(f"rank {rank}, {name_of(opening)}: nothing that it runs uses this channel")
            if counts[opening] != 1:
                raise ProofError(f"rank {rank}, {name_of(opening)}: opened {counts[opening]} times instead of once")
    _run(lines)


def used(plan: Plan, programs: Iterable[Program]) -> set[Opening]:
    """The channels that programs use: of messages, of exchanges, which every expert group has, and of collectives."""
    programs = list(programs)
    bodies = {(rank, id(b)): b for program in programs for rank, row in enumerate(program.bodies) for b in row}
    found: set[Opening] = set()
    for (rank, _), body in bodies.items():  # programs share most of them
        for _, i in body.messages:
            if i.peer != rank:
                found.add(Opening("edge", (rank, i.peer) if i.kind == "send" else (i.peer, rank), "each"))
    if plan.mesh.expert_group > 1:
        for rank in range(plan.mesh.pp):
            found |= _of_exchanges(plan, rank)
    if plan.mesh.tp > 1:
        found |= {Opening("tensor", (rank,), "tensor") for rank in range(plan.mesh.pp)}
    if plan.mesh.cp > 1:
        found |= {Opening("context", (rank,), "context") for rank in range(plan.mesh.pp)}
    if plan.mesh.sq > 1:
        found |= {Opening("choices", (rank,), "sequence") for rank in range(plan.mesh.pp)}
    calls = {(each.kind, id(each.bucket)): each.bucket for program in programs for each in program.collectives}
    several = {_meeting(plan, kind, bucket) if bucket else None for (kind, _), bucket in calls.items()}
    sites = {i.site for body in bodies.values() for i in body.instructions if i.kind in ("gather", "scatter")}
    for bucket in plan.buckets:
        if not sites.isdisjoint(bucket.sites):
            several |= {bucket.holders.on(rank) for rank in bucket.holders.pipeline_ranks}
    for holders in several:
        found |= _of_collective(plan, holders)
    return found


def _meeting(plan: Plan, kind: str, bucket: Bucket) -> Holders:
    """Who sums a bucket's gradients in the epilogue, or gathers its weights with the update: all of its holders, or the
    holders of the same part, as those of the first column are. Parts of weights are held at zero = 3 alone."""
    of_parts = bucket.sites and (kind == "reduce" or plan.zero == 3)
    return bucket.holders.at(bucket.holders.columns.start) if of_parts else bucket.holders


def _of_exchanges(plan: Plan, rank: int) -> set[Opening]:
    """The channels of rows and counts: of whole expert groups, or of those that tokens go through, a node's last."""
    if not plan.mesh.node:
        return {Opening("expert", (rank,), "block"), Opening("counts", (rank,), "block")}
    found = {Opening("expert", (rank,), "across"), Opening("counts", (rank,), "across")}
    if plan.mesh.node > 1:
        found |= {Opening("expert", (rank,), "node"), Opening("counts", (rank,), "node")}
    return found


def _of_collective(plan: Plan, holders: Sequence[int] | None) -> set[Opening]:
    """The channel of a bucket's holders, read from the ranks themselves; of the whole world for None."""
    mesh = plan.mesh
    if holders is None:
        return {Opening("world", tuple(range(mesh.pp)), "all")} if mesh.world > 1 else set()
    several = list(holders)
    ranks = tuple(sorted({rank // mesh.columns for rank in several}))  # mesh.coordinates, thousands of times
    held = len(several) // len(ranks)
    if held in (1, mesh.columns):
        return {Opening("reduce", ranks, "each" if held < mesh.columns else "all")}
    if several[1] - several[0] == 1:  # neighbours, and not all: of slices of the same experts
        return {Opening("reduce", ranks, "experts")}
    return {Opening("reduce", ranks, "slice" if mesh.tp > 1 and held == mesh.columns // mesh.tp else "member")}


def name_of(opening: Opening) -> str:
    """The name of a row in messages: open edge 0>1, open reduce 0, 1."""
    between = ">" if opening.kind == "edge" else ", "
    return f"open {opening.kind} {between.join(map(str, opening.ranks))}"


def _run(lines: Sequence[Line]) -> None:
    """A maximal run: a rank goes on from an opening once all its ranks have come to it."""
    done, arrived = [0] * len(lines), Counter[Opening]()
    runnable = deque(range(len(lines)))
    while runnable:
        rank = runnable.popleft()
        if done[rank] == len(lines[rank]):
            continue
        opening = lines[rank][done[rank]]
        arrived[opening] += 1
        if arrived[opening] == len(opening.ranks):
            for member in opening.ranks:
                done[member] += 1
            runnable.extend(opening.ranks)
    stuck = [rank for rank, line in enumerate(lines) if done[rank] < len(line)]
    if stuck:
        waits = [f"rank {rank}: {name_of(lines[rank][done[rank]])}" for rank in stuck]
        raise ProofError(f"{'; '.join(waits)}; none of them can go on")
