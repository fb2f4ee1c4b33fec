"""Sixth pass, over start-up: every channel that the programs use is opened before the first step, and no rank hangs.

In the model, opening a channel blocks the host of each of its ranks until all of them have come, as NCCL does when it
makes a communicator. Each rank opens its channels in a fixed order, so one maximal run decides every interleaving, as
in the second pass. Once all channels are open, the steps run as the second pass has proven them.

An `Opening` names pipeline ranks. All data ranks of a pipeline rank open their channels at the same point of their
order, and these channels have no rank in common, so an opening acts as one meeting of pipeline ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from compiler.ir import Bucket, Plan, Program
from compiler.ir.holders import Holders
from compiler.program.proof.certificate import ProofError
from runtime.contract import Opening
from runtime.contract.mesh import word_of

Line = Sequence[Opening]  # the channels that a pipeline rank opens, in order


def check_start(plan: Plan, openings: Sequence[Opening], programs: Iterable[Program]) -> None:
    """Raise ProofError unless the openings are exactly those that the programs need, and no rank can hang."""
    ranks = range(plan.mesh.pp)
    for opening in openings:
        if not opening.ranks or not set(opening.ranks) <= set(ranks):
            raise ProofError(f"{name_of(opening)}: there is no such rank")
    check_lines([[o for o in openings if rank in o.ranks] for rank in ranks], used_channels(plan, programs))


def check_lines(lines: Sequence[Line], needed: Iterable[Opening]) -> None:
    """Raise ProofError unless each rank opens every channel it needs once, and no other, and none waits for ever.

    `lines`: the openings of each pipeline rank.
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


def used_channels(plan: Plan, programs: Iterable[Program]) -> set[Opening]:
    """The channels that programs use: for messages, for the exchanges of expert groups, and for collectives."""
    programs = list(programs)
    bodies = {(rank, id(b)): b for program in programs for rank, row in enumerate(program.bodies) for b in row}
    channels: set[Opening] = set()
    for (rank, _), body in bodies.items():  # programs share most bodies
        for _, i in body.messages:
            if i.peer != rank:
                channels.add(Opening("edge", (rank, i.peer) if i.kind == "send" else (i.peer, rank), "each"))
    if plan.mesh.expert_group > 1:
        for rank in range(plan.mesh.pp):
            channels |= _of_exchanges(plan, rank)
    if plan.mesh.tp > 1:
        channels |= {Opening("tensor", (rank,), "tensor") for rank in range(plan.mesh.pp)}
    if plan.mesh.cp > 1:
        channels |= {Opening("context", (rank,), "context") for rank in range(plan.mesh.pp)}
    if plan.mesh.sq > 1:
        channels |= {Opening("choices", (rank,), "sequence") for rank in range(plan.mesh.pp)}
    calls = {(call.kind, id(call.bucket)): call.bucket for program in programs for call in program.collectives}
    groups = {_reducing_ranks(plan, kind, bucket) if bucket else None for (kind, _), bucket in calls.items()}
    sites = {i.site for body in bodies.values() for i in body.instructions if i.kind in ("gather", "scatter")}
    for bucket in plan.buckets:
        if not sites.isdisjoint(bucket.sites):
            groups |= {bucket.sharing(rank) for rank in bucket.holders.pipeline_ranks}
    for holders in groups:
        channels |= _of_collective(plan, holders)
    return channels


def _reducing_ranks(plan: Plan, kind: str, bucket: Bucket) -> Holders:
    """The ranks that reduce a bucket in the epilogue, or gather its weights with the update.

    These are all of its holders or, if it is sharded, the holders of one shard: those of the first one stand for all.
    Only zero = 3 shards weights.
    """
    return bucket.keepers if kind == "reduce" or plan.zero == 3 else bucket.holders


def _of_exchanges(plan: Plan, rank: int) -> set[Opening]:
    """The channels of rows and counts: one over the expert group, or across and inside nodes."""
    if not plan.mesh.node:
        return {Opening("expert", (rank,), "block"), Opening("counts", (rank,), "block")}
    channels = {Opening("expert", (rank,), "across"), Opening("counts", (rank,), "across")}
    if plan.mesh.node > 1:
        channels |= {Opening("expert", (rank,), "node"), Opening("counts", (rank,), "node")}
    return channels


def _of_collective(plan: Plan, holders: Sequence[int] | None) -> set[Opening]:
    """The channel of a bucket's holders, derived from their ranks; the channel of the world for None."""
    mesh = plan.mesh
    if holders is None:
        return {Opening("world", tuple(range(mesh.pp)), "all")} if mesh.world > 1 else set()
    members = list(holders)
    ranks = tuple(sorted({rank // mesh.columns for rank in members}))  # mesh.coordinates, inlined for speed
    columns = [rank % mesh.columns for rank in members[: len(members) // len(ranks)]]
    word = word_of(columns, mesh)
    if word is None:
        raise ProofError(f"open: no channel has the ranks {members}")
    return {Opening("reduce", ranks, word)}


def name_of(opening: Opening) -> str:
    """The name of an opening in messages, such as `open edge 0>1` or `open reduce 0, 1`."""
    between = ">" if opening.kind == "edge" else ", "
    return f"open {opening.kind} {between.join(map(str, opening.ranks))}"


def _run(lines: Sequence[Line]) -> None:
    """A maximal run: a rank passes an opening once all ranks of the opening have come to it."""
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
