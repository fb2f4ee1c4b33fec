"""Schedule → Program: one body per distinct action or pair and rank, then posts and releases around their invocations.

Every ordered pair of ranks that talk has one channel, and a message's place in it is its producer's: the order in which
the sender's bodies end, which is also what orders them in time. Receives are posted in that order, one invocation
before they are awaited, so a channel is in order at both ends under every placement. A send is never waited for: its
buffer is released where the rank has since received something that the peer sent after taking this message.

Two stages that follow each other on one rank (the bottom of a V, a pipeline of one rank) hand their messages over
inside it: a send to the own rank, with neither post nor release; the value moves, its storage stays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from compiler.ir import Body, Cut, Instruction, Invocation, Message, Plan, Program
from compiler.lower.chains import Chains
from compiler.lower.lanes import Best, best_order
from compiler.lower.order import finish, interleave
from compiler.rates import core_rates
from compiler.rates.on_ranks import OnRanks, kinds_of, on_ranks
from compiler.schedules.schedule import Schedule
from runtime.actions import Action, Step, actions_of

Point = tuple[int, int]  # (invocation, position in it)
Talk = Sequence[tuple[int, int, str, int]]  # (peer, position in the body, producer, slot)
Ends = tuple[tuple[int, Message], ...]  # posts or releases of an invocation
Call = tuple[str, tuple[int, ...]]  # body, micro-batches
Names = dict[tuple[str | int, ...], str]  # of bodies, by kind and stage of their actions
Bodies = dict[tuple[str, tuple[tuple[int, int], ...], int], Body]  # by name, the peers of each slot, and the device


def lower(
    plan: Plan,
    schedule: Schedule,
    cuts: Mapping[str, Cut],
    rates: OnRanks | None = None,
    evaluate: bool = False,
    made: Bodies | None = None,
    best: Best = best_order,
) -> Program:
    """The program of `schedule` on the plan's stages. `cuts`: by site of use. `evaluate`: forwards keep nothing.

    `rates` are those of the pipeline ranks: on another kind of device the instructions of a body go in another order.
    `made`: bodies of other programs of the same plan, cuts and rates, to be taken again; new ones are added. `best`:
    who searches for the orders of their instructions, or knows them (kept.py).
    """
    made = {} if made is None else made
    each = on_ranks(rates or core_rates(), schedule.num_ranks)

    @cache
    def chains(stage: int, before: int, after: int, kind: int) -> Chains:
        return Chains(plan.stages[stage], cuts, each[kind], before, after)

    names: Names = {}
    calls = [[_call(step, evaluate, names) for step in steps] for steps in schedule.actions]
    # Ranks of both directions have bodies that differ in whom they talk to alone.
    alike: dict[tuple[str, int], Body] = {}
    bodies = tuple(
        _bodies(schedule, calls[rank], partial(chains, kind=kind), rank, evaluate, made, alike, kind, best)
        for rank, kind in enumerate(kinds_of(each))
    )
    output = next((s.output for s in plan.stages if s.output), None)
    return Program(
        name="evaluate" if evaluate else schedule.name,
        num_micro_batches=schedule.num_micro_batches,
        stage_placement=schedule.stage_placement,
        bodies=bodies,
        invocations=_with_channels(bodies, calls),
        message=output,
        reduces=() if evaluate else tuple(b for b in plan.buckets if len(b.holders) > 1),
    )


def body_name(step: Step, evaluate: bool = False) -> str:
    names = [f"{a.kind}{a.stage}" for a in actions_of(step)]
    return "_".join(n.replace("F", "E") if evaluate else n for n in names)


def _call(step: Step, evaluate: bool, names: Names) -> Call:
    key: tuple[str | int, ...]
    micro_batches: tuple[int, ...]
    if isinstance(step, Action):
        key, micro_batches = (step.kind, step.stage), (step.micro_batch,)
    else:
        a, b = step.first, step.second
        key, micro_batches = (a.kind, a.stage, b.kind, b.stage), (a.micro_batch, b.micro_batch)
    if key not in names:
        names[key] = body_name(step, evaluate)
    return names[key], micro_batches


def _bodies(
    schedule: Schedule,
    calls: Sequence[Call],
    chains: Callable[[int, int, int], Chains],
    rank: int,
    evaluate: bool,
    made: Bodies,
    alike: dict[tuple[str, int], Body],
    kind: int,
    best: Best,
) -> tuple[Body, ...]:
    """Of a rank; `kind`: the first rank that is on the same kind of device."""
    found: dict[str, Body] = {}
    neighbours: dict[str, tuple[tuple[int, int], ...]] = {}
    towards = [schedule.direction(k) for k in range(schedule.num_micro_batches)]
    ways = [(name, tuple([towards[k] for k in micro_batches])) for name, micro_batches in calls]
    # Whom a body talks to depends on the directions alone.
    for (name, _), step in dict(zip(ways, schedule.actions[rank], strict=True)).items():
        peers = tuple(_neighbours(schedule, action) for action in actions_of(step))
        assert neighbours.setdefault(name, peers) == peers, f"{name} on rank {rank} has more than one pair of peers"
        if name not in found:
            if (name, peers, kind) not in made:
                if (name, kind) not in alike:
                    of_slots = [chains(a.stage, *p) for a, p in zip(actions_of(step), peers, strict=True)]
                    alike[name, kind] = _body(step, name, of_slots, evaluate, best)
                made[name, peers, kind] = _between(alike[name, kind], peers)
            found[name] = made[name, peers, kind]
    return tuple(found[name] for name in sorted(found))


def _body(step: Step, name: str, chains: Sequence[Chains], evaluate: bool, best: Best) -> Body:
    actions = tuple(f"{a.kind}{a.stage}" for a in actions_of(step))
    order = interleave([c.of(a[0]) for c, a in zip(chains, actions, strict=True)], best)
    kept = [frozenset() if evaluate else c.kept(a[0]) for c, a in zip(chains, actions, strict=True)]
    return Body(name, actions, finish(order, actions, kept))


def _between(body: Body, peers: Sequence[tuple[int, int]]) -> Body:
    """The same between other ranks: forwards come from the first of a slot's peers, backwards from the second."""

    def of(i: Instruction) -> Instruction:
        before, after = peers[i.slot]
        peer = before if (i.kind == "receive") == (i.phase == "F") else after
        return i if i.kind not in ("send", "receive") or i.peer == peer else replace(i, peer=peer)

    return replace(body, instructions=tuple(map(of, body.instructions)))


def _neighbours(schedule: Schedule, action: Action) -> tuple[int, int]:
    def rank(stage: int) -> int:
        if not 0 <= stage < schedule.num_stages:
            return -1
        return schedule.rank_of(stage, action.micro_batch)

    return rank(action.stage - 1), rank(action.stage + 1)


@dataclass(slots=True)
class _Channel:
    """From one rank to another: its messages in the order sent, where each is sent and where it is awaited."""

    messages: list[Message] = field(default_factory=list)
    sent: list[Point] = field(default_factory=list)
    awaited: list[Point] = field(default_factory=list)
    place: dict[tuple[str, int], int] = field(default_factory=dict)  # of messages, by what they are
    order: list[tuple[int, int]] = field(default_factory=list)  # (invocation that awaits, place), as awaited


def _with_channels(
    bodies: Sequence[Sequence[Body]], calls: Sequence[Sequence[Call]]
) -> tuple[tuple[Invocation, ...], ...]:
    channels: list[dict[int, _Channel]] = [defaultdict(_Channel) for _ in calls]  # by source, then by destination
    exchanged = [{body.name: _exchanged(rank, body) for body in row} for rank, row in enumerate(bodies)]
    for row, going, talks in zip(calls, channels, exchanged, strict=True):
        for index, (name, micro_batches) in enumerate(row):
            for peer, position, action, slot in talks[name][0]:
                channel = going[peer]
                message = Message(action, micro_batches[slot])
                channel.place[message] = len(channel.messages)
                channel.messages.append(message)
                channel.sent.append((index, position))
    for channel in (channel for going in channels for channel in going.values()):
        channel.awaited = [(0, 0)] * len(channel.messages)
    for rank, (row, talks) in enumerate(zip(calls, exchanged, strict=True)):
        for index, (name, micro_batches) in enumerate(row):
            for peer, position, action, slot in talks[name][1]:
                channel = channels[peer][rank]
                place = channel.place[action, micro_batches[slot]]
                channel.awaited[place] = index, position
                channel.order.append((index, place))
    before: list[list[Ends]] = [[()] * len(row) for row in calls]
    after: list[list[Ends]] = [[()] * len(row) for row in calls]
    for source, going in enumerate(channels):
        for destination, channel in sorted(going.items()):
            _post(channel, source, before[destination])
            _release(channel, channels[destination][source], destination, after[source])
    return tuple(
        tuple([Invocation(*call, *ends) for call, *ends in zip(row, posts, releases, strict=True)])
        for row, posts, releases in zip(calls, before, after, strict=True)
    )


def _exchanged(rank: int, body: Body) -> tuple[Talk, Talk]:
    """What a body sends, and what it receives; what is handed over inside the rank is neither."""
    sends: list[tuple[int, int, str, int]] = []
    receives: list[tuple[int, int, str, int]] = []
    for position, i in body.messages:
        if i.peer != rank:
            row = i.peer, position, _produced(i.kind, i.phase, int(i.action[1:])), i.slot
            (sends if i.kind == "send" else receives).append(row)
    return sends, receives


def _produced(kind: str, phase: str, stage: int) -> str:
    """The action that makes the message which a send gives or a receive awaits."""
    if phase == "F":
        return f"F{stage}" if kind == "send" else f"F{stage - 1}"
    return f"B{stage}" if kind == "send" else f"B{stage + 1}"


def _post(channel: _Channel, source: int, before: list[Ends]) -> None:
    """Before an invocation of the receiver all is posted up to what the next one awaits, as sent."""
    posted = 0
    for index, place in channel.order:
        if place >= posted:
            before[max(index - 1, 0)] += tuple([(source, message) for message in channel.messages[posted : place + 1]])
            posted = place + 1


def _release(channel: _Channel, back: _Channel, destination: int, after: list[Ends]) -> None:
    """After the invocation of the sender by which a message's arrival is implied; `back` is the channel the other way.

    Replies may be awaited in another order than sent, so they are searched by when they are awaited.
    """
    replies = sorted(back.order)
    count, earliest = (
        len(replies),
        0,
    )  # the first of the replies that the rank awaits after the message's own invocation
    for message, (index, _), awaited in zip(channel.messages, channel.sent, channel.awaited, strict=True):
        first = bisect_right(back.sent, awaited)  # the first reply sent after this message was taken
        while earliest < count and replies[earliest][0] <= index:
            earliest += 1
        k = earliest
        while k < count and replies[k][1] < first:
            k += 1
        if k < count:
            after[replies[k][0]] += ((destination, message),)
