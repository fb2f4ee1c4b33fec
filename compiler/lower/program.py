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
from functools import cache

from compiler.ir import Body, Cut, Instruction, Invocation, Message, Plan, Program
from compiler.lower.chains import Chains
from compiler.lower.order import finish, interleave
from compiler.rates import Rates, core_rates
from compiler.schedules.placement import num_stages, rank_of
from compiler.schedules.schedule import Schedule
from runtime.actions import Action, Step, actions_of

Event = tuple[int, int, Message]  # (invocation, position in it, message)
Channel = tuple[int, int]  # (source, destination) pipeline ranks
Bodies = dict[tuple[str, tuple[tuple[int, int], ...]], Body]  # by name and the peers of each slot


def lower(
    plan: Plan,
    schedule: Schedule,
    cuts: Mapping[str, Cut],
    rates: Rates | None = None,
    evaluate: bool = False,
    made: Bodies | None = None,
) -> Program:
    """The program of `schedule` on the plan's stages. `cuts`: by site of use. `evaluate`: forwards keep nothing.

    `made`: bodies of other programs of the same plan, cuts and rates, to be taken again; new ones are added.
    """
    rates, made = rates or core_rates(), {} if made is None else made

    @cache
    def chains(stage: int, before: int, after: int) -> Chains:
        return Chains(plan.stages[stage], cuts, rates, before, after)

    alike: dict[str, Body] = {}  # ranks of both directions have bodies that differ in whom they talk to alone
    bodies = tuple(_bodies(schedule, chains, rank, evaluate, made, alike) for rank in range(schedule.num_ranks))
    tables = [{b.name: b for b in ranks} for ranks in bodies]
    calls = [[_call(step, evaluate) for step in steps] for steps in schedule.actions]
    output = next((s.output for s in plan.stages if s.output), None)
    return Program(
        name="evaluate" if evaluate else schedule.name,
        num_micro_batches=schedule.num_micro_batches,
        placement=schedule.placement,
        bodies=bodies,
        invocations=_with_channels(tables, calls),
        message=output,
        reduces=() if evaluate else tuple(b for b in plan.buckets if len(b.holders) > 1),
    )


def body_name(step: Step, evaluate: bool = False) -> str:
    names = [f"{a.kind}{a.stage}" for a in actions_of(step)]
    return "_".join(n.replace("F", "E") if evaluate else n for n in names)


def _call(step: Step, evaluate: bool) -> tuple[str, tuple[int, ...]]:
    return body_name(step, evaluate), tuple(a.micro_batch for a in actions_of(step))


def _bodies(
    schedule: Schedule,
    chains: Callable[[int, int, int], Chains],
    rank: int,
    evaluate: bool,
    made: Bodies,
    alike: dict[str, Body],
) -> tuple[Body, ...]:
    found: dict[str, Body] = {}
    neighbours: dict[str, tuple[tuple[int, int], ...]] = {}
    for step in schedule.actions[rank]:
        name = body_name(step, evaluate)
        peers = tuple(_neighbours(schedule, action) for action in actions_of(step))
        assert neighbours.setdefault(name, peers) == peers, f"{name} on rank {rank} has more than one pair of peers"
        if name not in found:
            if (name, peers) not in made:
                if name not in alike:
                    of_slots = [chains(a.stage, *p) for a, p in zip(actions_of(step), peers, strict=True)]
                    alike[name] = _body(step, name, of_slots, evaluate)
                made[name, peers] = _between(alike[name], peers)
            found[name] = made[name, peers]
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
    bodies: list[dict[str, Body]], calls: list[list[tuple[str, tuple[int, ...]]]]
) -> tuple[tuple[Invocation, ...], ...]:
    sends: dict[Channel, list[Event]] = defaultdict(list)
    awaits: dict[Channel, list[Event]] = defaultdict(list)
    for rank, invocations in enumerate(calls):
        exchanged = {
            name: [(at, i) for at, i in enumerate(body.instructions) if i.kind in ("send", "receive")]
            for name, body in bodies[rank].items()
        }
        for index, (name, micro_batches) in enumerate(invocations):
            for position, i in exchanged[name]:
                if i.peer == rank:
                    continue  # handed over, not sent
                message = _message(i.kind, i.phase, int(i.action[1:]), micro_batches[i.slot])
                channel = (rank, i.peer) if i.kind == "send" else (i.peer, rank)
                (sends if i.kind == "send" else awaits)[channel].append((index, position, message))
    posts = {channel: _posts(sends[channel], awaits[channel]) for channel in sends}
    releases = {
        (source, peer): _releases(sends[source, peer], awaits[source, peer], sends[peer, source], awaits[peer, source])
        for source, peer in list(sends)
    }
    return tuple(
        tuple(
            Invocation(
                body=name,
                micro_batches=micro_batches,
                posts=tuple(
                    (source, message)
                    for (source, destination), table in sorted(posts.items())
                    if destination == rank
                    for message in table.get(index, ())
                ),
                releases=tuple(
                    (destination, message)
                    for (source, destination), table in sorted(releases.items())
                    if source == rank
                    for message in table.get(index, ())
                ),
            )
            for index, (name, micro_batches) in enumerate(invocations)
        )
        for rank, invocations in enumerate(calls)
    )


def _message(kind: str, phase: str, stage: int, micro_batch: int) -> Message:
    """The message a send gives or a receive awaits, named by its producer."""
    if phase == "F":
        return Message(f"F{stage}" if kind == "send" else f"F{stage - 1}", micro_batch)
    return Message(f"B{stage}" if kind == "send" else f"B{stage + 1}", micro_batch)


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
        later = range(bisect_left(replies, (index + 1, 0)), len(replies))
        known = next((replies[k][0] for k in later if replies[k][1] >= first), None)
        if known is not None:
            releases[known].append(message)
    return releases
