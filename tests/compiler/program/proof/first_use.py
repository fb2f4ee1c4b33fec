"""A machine on which the first use of a channel blocks the host of each rank until all have arrived, as with NCCL.

It does not use the proof: ranks are generators that yield what they wait for, and are resumed in random order until
none can continue. World ranks are simulated one by one if only start-up runs; if a program runs, one column stands
for all, as all run the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from compiler.ir import BucketCollective, Plan, Program
from runtime.contract import Mesh, Opening

Channel = tuple[str, tuple[int, ...]]
Ready = Callable[[], bool]


class UnopenedError(Exception):
    """A rank uses a channel that it has not opened, or opens one again."""


@dataclass
class Machine:
    """The progress of the ranks. `lazy`: unopened channels are opened by their first use."""

    lazy: bool = False
    came: dict[Hashable, set[int]] = field(default_factory=dict)  # channel or collective → ranks that have come
    used: set[tuple[int, Channel]] = field(default_factory=set)
    sent: set[Hashable] = field(default_factory=set)

    def open(self, rank: int, channel: Channel) -> Iterator[Ready]:
        """Use a channel for the first time."""
        if (rank, channel) in self.used:
            raise UnopenedError(f"rank {rank} opens {channel} again")
        self.used.add((rank, channel))
        yield from self.meet(rank, channel, channel[1])

    def use(self, rank: int, channel: Channel) -> Iterator[Ready]:
        """Use a channel, which may be the first time."""
        if (rank, channel) not in self.used:
            if not self.lazy:
                raise UnopenedError(f"rank {rank} uses {channel}, which it has not opened")
            yield from self.open(rank, channel)

    def meet(self, rank: int, what: Hashable, members: Sequence[int]) -> Iterator[Ready]:
        """Wait until all members have come."""
        arrived = self.came.setdefault(what, set())
        arrived.add(rank)
        yield lambda: arrived >= set(members)


def run(ranks: Sequence[Iterator[Ready]], generator: random.Random) -> list[int]:
    """Resume ranks in random turns until none can go on; those that are not at their end."""
    waiting: dict[int, Ready] = dict.fromkeys(range(len(ranks)), lambda: True)
    moved = True
    while moved:
        moved = False
        for rank in generator.sample([*waiting], len(waiting)):
            while rank in waiting and waiting[rank]():
                moved = True
                try:
                    waiting[rank] = next(ranks[rank])
                except StopIteration:
                    del waiting[rank]
    return sorted(waiting)


def starts(lines: Sequence[Sequence[Opening]], mesh: Mesh, machine: Machine) -> list[Iterator[Ready]]:
    """The start-up of every world rank, whose pipeline rank opens the rows of a line."""

    def start(rank: int) -> Iterator[Ready]:
        for opening in lines[rank // mesh.columns]:
            ranks = opening.channel_of(mesh, rank)
            if ranks is None:
                raise UnopenedError(f"rank {rank} is in no channel of {opening}")
            yield from machine.open(rank, (opening.kind, ranks))

    return [start(rank) for rank in range(mesh.world)]


def steps(program: Program, plan: Plan, lines: Sequence[Sequence[Opening]], machine: Machine) -> list[Iterator[Ready]]:
    """The pipeline ranks of a program, each after opening the channels of its line."""
    num_ranks = len(program.bodies)

    def step(rank: int) -> Iterator[Ready]:
        for opening in lines[rank]:
            yield from machine.open(rank, (f"{opening.kind} {opening.columns}", opening.ranks))
        yield from _collectives(rank, program.prologue, plan, machine)
        yield from _calls(rank, program, plan, machine)
        yield from _collectives(rank, (*program.epilogue, *program.update), plan, machine)

    return [step(rank) for rank in range(num_ranks)]


def _calls(rank: int, program: Program, plan: Plan, machine: Machine) -> Iterator[Ready]:
    bodies = {body.name: body for body in program.bodies[rank]}
    for call in program.invocations[rank]:
        for source, _ in call.posts:
            yield from machine.use(rank, ("edge each", (source, rank)))
        body = bodies[call.body]
        if plan.mesh.ep > 1 and any(i.kind == "counts" for i in body.instructions):
            hops = (["across"] + ["node"] * (plan.mesh.node > 1)) if plan.mesh.node else ["block"]
            for kind, columns in product(("counts", "expert"), hops):
                yield from machine.use(rank, (f"{kind} {columns}", (rank,)))
        for _, i in body.messages:
            if i.peer != rank:
                forward, stage = i.phase == "F", int(i.action[1:])
                producer = stage if i.kind == "send" else stage - 1 if forward else stage + 1
                message = (forward, producer, call.micro_batches[i.slot])
                if i.kind == "send":
                    yield from machine.use(rank, ("edge each", (rank, i.peer)))
                    machine.sent.add((rank, i.peer, message))
                else:
                    wanted = (i.peer, rank, message)
                    yield lambda wanted=wanted: wanted in machine.sent  # type: ignore[misc]


def _collectives(rank: int, listed: Sequence[BucketCollective], plan: Plan, machine: Machine) -> Iterator[Ready]:
    mesh = plan.mesh
    for collective in listed:
        members = collective.bucket.holders if collective.bucket else range(mesh.world)
        ranks = tuple(sorted({member // mesh.columns for member in members}))
        if rank in ranks and len(members) > 1:
            count = len(members) // len(ranks)
            of_parts = collective.bucket and collective.bucket.sites and (collective.kind == "reduce" or plan.zero == 3)
            columns = "each" if of_parts or count == 1 < mesh.columns else "all" if count == mesh.columns else "member"
            yield from machine.use(rank, (f"reduce {columns}" if collective.bucket else "world all", ranks))
            yield from machine.meet(rank, (collective.kind, collective.name), ranks)
