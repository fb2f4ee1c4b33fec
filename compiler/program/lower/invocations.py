"""Calls of bodies → invocations: what each rank posts before one, and which buffers it releases after it.

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
from collections.abc import Sequence
from dataclasses import dataclass, field

from compiler.ir import Body, Invocation, Message

Point = tuple[int, int]  # (invocation, position in it)
Ends = tuple[tuple[int, Message], ...]  # posts or releases of an invocation
Call = tuple[str, tuple[int, ...]]  # body, micro-batches


@dataclass(slots=True)
class _Channel:
    """A channel from one rank to another: its messages in the order sent, where each is sent and where awaited."""

    messages: list[Message] = field(default_factory=list)
    sent: list[Point] = field(default_factory=list)
    awaited: list[Point] = field(default_factory=list)
    place: dict[tuple[str, int], int] = field(default_factory=dict)  # of messages, by what they are
    order: list[tuple[int, int]] = field(default_factory=list)  # (invocation that awaits, place), as awaited


Talk = Sequence[tuple[_Channel, int, str, int]]  # (channel, position in the body, producer, slot)


def invocations_of(
    bodies: Sequence[Sequence[Body]], calls: Sequence[Sequence[Call]]
) -> tuple[tuple[Invocation, ...], ...]:
    """The invocations of every pipeline rank, from its bodies and its calls of them in their order."""
    channels: list[dict[int, _Channel]] = [defaultdict(_Channel) for _ in calls]  # by source, then by destination
    exchanged = [{body.name: _exchanged(rank, body, channels) for body in row} for rank, row in enumerate(bodies)]
    for row, talks in zip(calls, exchanged, strict=True):
        for index, (name, micro_batches) in enumerate(row):
            for channel, position, action, slot in talks[name][0]:
                message = Message(action, micro_batches[slot])
                channel.place[message] = len(channel.messages)
                channel.messages.append(message)
                channel.sent.append((index, position))
    for channel in (channel for going in channels for channel in going.values()):
        channel.awaited = [(0, 0)] * len(channel.messages)
    for row, talks in zip(calls, exchanged, strict=True):
        for index, (name, micro_batches) in enumerate(row):
            for channel, position, action, slot in talks[name][1]:
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
        tuple([Invocation(*call, *ends) for call, ends in zip(row, zip(posts, releases, strict=True), strict=True)])
        for row, posts, releases in zip(calls, before, after, strict=True)
    )


def _exchanged(rank: int, body: Body, channels: Sequence[dict[int, _Channel]]) -> tuple[Talk, Talk]:
    """What a body sends, and what it receives; what is handed over inside the rank is neither."""
    sends: list[tuple[_Channel, int, str, int]] = []
    receives: list[tuple[_Channel, int, str, int]] = []
    for position, i in body.messages:
        if i.peer != rank:
            produced = _produced(i.kind, i.phase, int(i.action[1:]))
            if i.kind == "send":
                sends.append((channels[rank][i.peer], position, produced, i.slot))
            else:
                receives.append((channels[i.peer][rank], position, produced, i.slot))
    return sends, receives


def _produced(kind: str, phase: str, stage: int) -> str:
    """The action that makes the message which a send gives or a receive awaits."""
    if phase == "F":
        return f"F{stage}" if kind == "send" else f"F{stage - 1}"
    return f"B{stage}" if kind == "send" else f"B{stage + 1}"


def _post(channel: _Channel, source: int, before: list[Ends]) -> None:
    """Post before each invocation of the receiver all messages up to what the next one awaits, in the order sent."""
    posted = 0
    for index, place in channel.order:
        if place >= posted:
            before[max(index - 1, 0)] += tuple([(source, message) for message in channel.messages[posted : place + 1]])
            posted = place + 1


def _release(channel: _Channel, back: _Channel, destination: int, after: list[Ends]) -> None:
    """Release each message after the sender's invocation that implies its arrival; `back` is the channel the other way.

    Replies may be awaited in another order than sent, so they are searched by when they are awaited.
    """
    replies = sorted(back.order)
    count, earliest = len(replies), 0  # the first of the replies that the rank awaits behind the message's invocation
    for message, (index, _), awaited in zip(channel.messages, channel.sent, channel.awaited, strict=True):
        first = bisect_right(back.sent, awaited)  # the first reply sent after this message was taken
        while earliest < count and replies[earliest][0] <= index:
            earliest += 1
        k = earliest
        while k < count and replies[k][1] < first:
            k += 1
        if k < count:
            after[replies[k][0]] += ((destination, message),)
