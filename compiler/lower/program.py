"""Schedule → Program: one body per distinct action or pair and rank, then posts and releases around their invocations.

Every ordered pair of ranks that talk has one channel, and a message's place in it is its producer's: the order in which
the sender's bodies end, which is also what orders them in time. Receives are posted in that order, one invocation
before they are awaited, so a channel is in order at both ends under every placement. A send is never waited for: its
buffer is released where the rank has since received something that the peer sent after taking this message.

Two stages that follow each other on one rank (the bottom of a V, a pipeline of one rank) hand their messages over
inside it: a send to the own rank, with neither post nor release; the value moves, its storage stays.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from compiler.ir import Body, Cut, Instruction, Invocation, Message, Plan, Program
from compiler.lower.chains import Chains
from compiler.lower.order import finish, interleave
from compiler.rates import core_rates
from compiler.rates.on_ranks import OnRanks, kinds_of, on_ranks
from compiler.schedules.placement import direction, num_stages, rank_of
from compiler.schedules.schedule import Schedule
from runtime.actions import Action, Step, actions_of

Event = tuple[int, int, Message]  # (invocation, position in it, message)
Channel = tuple[int, int]  # (source, destination) pipeline ranks
Call = tuple[str, tuple[int, ...]]  # body, micro-batches
Bodies = dict[tuple[str, tuple[tuple[int, int], ...], int], Body]  # by name, the peers of each slot, and the device


def lower(
    plan: Plan,
    schedule: Schedule,
    cuts: Mapping[str, Cut],
    rates: OnRanks | None = None,
    evaluate: bool = False,
    made: Bodies | None = None,
) -> Program:
    """The program of `schedule` on the plan's stages. `cuts`: by site of use. `evaluate`: forwards keep nothing.

    `rates` are those of the pipeline ranks: on another kind of device the instructions of a body go in another order.
    `made`: bodies of other programs of the same plan, cuts and rates, to be taken again; new ones are added.
    """
    made = {} if made is None else made
    each = on_ranks(rates or core_rates(), schedule.num_ranks)

    @cache
    def chains(stage: int, before: int, after: int, kind: int) -> Chains:
        return Chains(plan.stages[stage], cuts, each[kind], before, after)

    calls = [[_call(step, evaluate) for step in steps] for steps in schedule.actions]
    # Ranks of both directions have bodies that differ in whom they talk to alone.
    alike: dict[tuple[str, int], Body] = {}
    bodies = tuple(
        _bodies(schedule, calls[rank], partial(chains, kind=kind), rank, evaluate, made, alike, kind)
        for rank, kind in enumerate(kinds_of(each))
    )
    output = next((s.output for s in plan.stages if s.output), None)
    return Program(
        name="evaluate" if evaluate else schedule.name,
        num_micro_batches=schedule.num_micro_batches,
        placement=schedule.placement,
        bodies=bodies,
        invocations=_with_channels(bodies, calls),
        message=output,
        reduces=() if evaluate else tuple(b for b in plan.buckets if len(b.holders) > 1),
    )


def body_name(step: Step, evaluate: bool = False) -> str:
    names = [f"{a.kind}{a.stage}" for a in actions_of(step)]
    return "_".join(n.replace("F", "E") if evaluate else n for n in names)


def _call(step: Step, evaluate: bool) -> Call:
    return body_name(step, evaluate), tuple(a.micro_batch for a in actions_of(step))


def _bodies(
    schedule: Schedule,
    calls: Sequence[Call],
    chains: Callable[[int, int, int], Chains],
    rank: int,
    evaluate: bool,
    made: Bodies,
    alike: dict[tuple[str, int], Body],
    kind: int,
) -> tuple[Body, ...]:
    """Of a rank; `kind`: the first rank that is on the same kind of device."""
    found: dict[str, Body] = {}
    neighbours: dict[str, tuple[tuple[int, int], ...]] = {}
    towards = [direction(schedule.placement, schedule.num_micro_batches, k) for k in range(schedule.num_micro_batches)]
    seen: set[tuple[str, tuple[int, ...]]] = set()  # whom a body talks to depends on the directions alone
    for step, (name, micro_batches) in zip(schedule.actions[rank], calls, strict=True):
        ways = tuple([towards[k] for k in micro_batches])
        if (name, ways) in seen:
            continue
        seen.add((name, ways))
        peers = tuple(_neighbours(schedule, action) for action in actions_of(step))
        assert neighbours.setdefault(name, peers) == peers, f"{name} on rank {rank} has more than one pair of peers"
        if name not in found:
            if (name, peers, kind) not in made:
                if (name, kind) not in alike:
                    of_slots = [chains(a.stage, *p) for a, p in zip(actions_of(step), peers, strict=True)]
                    alike[name, kind] = _body(step, name, of_slots, evaluate)
                made[name, peers, kind] = _between(alike[name, kind], peers)
            found[name] = made[name, peers, kind]
    return tuple(found[name] for name in sorted(found))


def _body(step: Step, name: str, chains: Sequence[Chains], evaluate: bool) -> Body:
    actions = tuple(f"{a.kind}{a.stage}" for a in actions_of(step))
    order = interleave([c.of(a[0]) for c, a in zip(chains, actions, strict=True)])
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
        if not 0 <= stage < num_stages(schedule.placement, schedule.num_ranks):
            return -1
        return rank_of(schedule.placement, schedule.num_ranks, schedule.num_micro_batches, stage, action.micro_batch)

    return rank(action.stage - 1), rank(action.stage + 1)


def _with_channels(
    bodies: Sequence[Sequence[Body]], calls: Sequence[Sequence[Call]]
) -> tuple[tuple[Invocation, ...], ...]:
    sends: dict[Channel, list[Event]] = defaultdict(list)
    awaits: dict[Channel, list[Event]] = defaultdict(list)
    for rank, invocations in enumerate(calls):
        exchanged = {body.name: _exchanged(rank, body, sends, awaits) for body in bodies[rank]}
        for index, (name, micro_batches) in enumerate(invocations):
            for events, position, action, slot in exchanged[name]:
                events.append((index, position, Message(action, micro_batches[slot])))
    posts = {channel: _posts(sends[channel], awaits[channel]) for channel in sends}
    releases = {
        (source, peer): _releases(sends[source, peer], awaits[source, peer], sends[peer, source], awaits[peer, source])
        for source, peer in list(sends)
    }
    result = []
    for rank, invocations in enumerate(calls):
        before: dict[int, list[tuple[int, Message]]] = defaultdict(list)
        after: dict[int, list[tuple[int, Message]]] = defaultdict(list)
        for (source, destination), posted in sorted(posts.items()):
            if destination == rank:
                for index, messages in posted.items():
                    before[index] += [(source, message) for message in messages]
        for (source, destination), released in sorted(releases.items()):
            if source == rank:
                for index, messages in released.items():
                    after[index] += [(destination, message) for message in messages]
        result.append(
            tuple(
                Invocation(name, micro_batches, tuple(before.get(index, ())), tuple(after.get(index, ())))
                for index, (name, micro_batches) in enumerate(invocations)
            )
        )
    return tuple(result)


def _exchanged(
    rank: int, body: Body, sends: dict[Channel, list[Event]], awaits: dict[Channel, list[Event]]
) -> list[tuple[list[Event], int, str, int]]:
    """Of every message that a body sends or awaits: the events it is one of, its place in the body, action and slot."""
    result = []
    for position, i in enumerate(body.instructions):
        if i.kind in ("send", "receive") and i.peer != rank:  # what is handed over is not sent
            events = sends[rank, i.peer] if i.kind == "send" else awaits[i.peer, rank]
            result.append((events, position, _produced(i.kind, i.phase, int(i.action[1:])), i.slot))
    return result


def _produced(kind: str, phase: str, stage: int) -> str:
    """The action that makes the message which a send gives or a receive awaits."""
    if phase == "F":
        return f"F{stage}" if kind == "send" else f"F{stage - 1}"
    return f"B{stage}" if kind == "send" else f"B{stage + 1}"


def _posts(sends: list[Event], awaits: list[Event]) -> dict[int, list[Message]]:
    """Invocation of the receiver → messages to post before it: all up to what the next one awaits, as sent."""
    order = [message for _, _, message in sends]
    place = {message: k for k, message in enumerate(order)}
    posts: dict[int, list[Message]] = defaultdict(list)
    posted = 0
    for index, _, message in awaits:
        needed = place[message] + 1
        posts[max(index - 1, 0)] += order[posted:needed]
        posted = max(posted, needed)
    return posts


def _releases(
    sends: list[Event], taken: list[Event], back: list[Event], received: list[Event]
) -> dict[int, list[Message]]:
    """Invocation of the sender → messages whose arrival is implied by then.

    `taken`: where the peer awaits them; `back`: what the peer sends here; `received`: where this rank awaits that.
    Replies may be awaited in another order than sent, so they are searched by when they are awaited.
    """
    taken_at = {message: (index, position) for index, position, message in taken}
    awaited_at = {message: index for index, _, message in received}
    sent = [(index, position) for index, position, _ in back]
    replies = sorted((awaited_at[message], number) for number, (_, _, message) in enumerate(back))
    releases: dict[int, list[Message]] = defaultdict(list)
    for index, _, message in sends:
        first = bisect_right(sent, taken_at[message])  # the first reply sent after this message was taken
        k = bisect_left(replies, (index + 1, 0))
        while k < len(replies) and replies[k][1] < first:
            k += 1
        if k < len(replies):
            releases[replies[k][0]].append(message)
    return releases
