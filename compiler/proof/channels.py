"""Second pass, over ranks together: one maximal run under zero-buffer rendezvous decides every interleaving.

Why one run is enough. Rank programs are straight lines and name their peers, so whether a rank can go on depends only
on how far the others have come, and going on never takes that away from anyone: all maximal runs end in the same
state. If that is the end of every program, no interleaving can hang; if not, all do. A message moves once it is both
sent and posted; a send never waits, a `receive` waits until its message has moved. There is one channel per ordered
pair of ranks, in order at both ends, so its k-th post must be its k-th send.

A send to the own rank has no channel: it must come before the `receive` of it in the rank's own line.

A column (one data coordinate) stands for all: they run one program, so the members of an exchange start the same
exchanges in the same order, and stepping all columns together is one of the runs.

A release promises that a message has moved. That must hold in every interleaving, hence follow from the order of
events alone: the peer's `receive` of it must lie in the releasing rank's past, which vector clocks decide.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

from compiler.ir import Body, Instruction, Message, Program
from compiler.proof.certificate import ProofError
from compiler.schedules.schedule import Schedule
from runtime.actions import Step, actions_of


class Event(NamedTuple):
    """One communication event of a rank; `step` is where it happens, `peer` the other end."""

    kind: Literal["post", "send", "receive", "release"]
    peer: int
    message: Message
    step: Step


@dataclass
class _Rank:
    """How far a rank has come, and what it knows of the others."""

    events: list[Event]
    clock: list[int]  # of rank q: how many of its events lie in this rank's past
    done: int = 0
    posted: set[tuple[int, Message]] = field(default_factory=set)  # not yet awaited
    in_flight: set[tuple[int, Message]] = field(default_factory=set)  # sent, not yet released
    kept: dict[Message, Event] = field(default_factory=dict)  # sent to itself, not yet received


def message_of(instruction: Instruction, micro_batch: int) -> Message:
    """The message that a send gives or a receive awaits, named by its producer."""
    return Message(producer_of(instruction), micro_batch)


def producer_of(instruction: Instruction) -> str:
    """The action whose message it is."""
    stage = int(instruction.action[1:])
    forward = instruction.phase == "F"
    if instruction.kind == "receive":
        stage += -1 if forward else 1
    return f"{'F' if forward else 'B'}{stage}"


def check_channels(program: Program, schedule: Schedule) -> int:
    """Raise ProofError unless all posts are in the sender's order, no rank can hang and releases are safe.

    Returns the number of messages between ranks.
    """
    events = [list(_events(program, schedule, rank)) for rank in range(schedule.num_ranks)]
    _check_order(events)
    _run([_Rank(row, [0] * len(events)) for row in events])
    return sum(event.kind == "send" and event.peer != rank for rank, row in enumerate(events) for event in row)


def _events(program: Program, schedule: Schedule, rank: int) -> Iterator[Event]:
    bodies = {body.name: [*_exchanged(body)] for body in program.bodies[rank]}
    for invocation, step in zip(program.invocations[rank], schedule.actions[rank], strict=True):
        for source, message in invocation.posts:
            yield Event("post", source, message, step)
        actions = actions_of(step)
        for kind, peer, producer, slot in bodies[invocation.body]:
            yield Event(kind, peer, Message(producer, actions[slot].micro_batch), step)
        for destination, message in invocation.releases:
            yield Event("release", destination, message, step)


def _exchanged(body: Body) -> Iterator[tuple[Literal["send", "receive"], int, str, int]]:
    """(kind, peer, producer, slot) of every message that a body sends or receives."""
    for i in body.instructions:
        if i.kind == "send" or i.kind == "receive":
            yield i.kind, i.peer, producer_of(i), i.slot


def _check_order(events: list[list[Event]]) -> None:
    """On every channel the k-th post must be the k-th send."""
    sends: dict[tuple[int, int], list[Event]] = defaultdict(list)
    posts: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for rank, row in enumerate(events):
        for event in row:
            if event.peer == rank and event.kind in ("send", "receive"):
                continue
            if not 0 <= event.peer < len(events) or event.peer == rank:
                raise ProofError(f"rank {rank}, {event.step}: {event.kind} {event.message} names rank {event.peer}")
            if event.kind == "send":
                sends[rank, event.peer].append(event)
            elif event.kind == "post":
                posts[event.peer, rank].append(event)
    for source, destination in sorted(sends.keys() | posts.keys()):
        given, taken = sends[source, destination], posts[source, destination]
        for k, (send, post) in enumerate(zip(given, taken, strict=False)):
            if send.message != post.message:
                raise ProofError(
                    f"rank {destination}, {post.step}: posts {post.message} as message {k} from rank {source}, "
                    f"which sends {send.message} as message {k} (in {send.step})"
                )
        if len(given) > len(taken):
            send = given[len(taken)]
            raise ProofError(f"rank {source}, {send.step}: send {send.message} is never posted by rank {destination}")
        if len(taken) > len(given):
            post = taken[len(given)]
            raise ProofError(f"rank {destination}, {post.step}: posts {post.message}, which rank {source} never sends")


def _run(ranks: list[_Rank]) -> None:
    sent: dict[tuple[int, int, Message], tuple[int, ...]] = {}  # (source, destination, message) -> sender's clock
    received: dict[tuple[int, int, Message], int] = {}  # -> which event of the destination the receive was
    runnable = deque(range(len(ranks)))
    waiting: dict[tuple[int, int, Message], int] = {}
    while runnable:
        rank = runnable.popleft()
        state = ranks[rank]
        clock = state.clock
        for event in islice(state.events, state.done, None):
            kind, peer, message, _ = event
            if kind == "receive" and peer != rank and (peer, rank, message) not in sent:
                waiting[peer, rank, message] = rank
                break
            state.done += 1
            clock[rank] = state.done
            if peer == rank:
                _hand_over(rank, state, event)
            elif kind == "send":
                state.in_flight.add((peer, message))
                sent[rank, peer, message] = tuple(clock)
                if (rank, peer, message) in waiting:
                    runnable.append(waiting.pop((rank, peer, message)))
            elif kind == "receive":
                _take(rank, state, event)
                clock[:] = map(max, clock, sent[peer, rank, message])
                received[peer, rank, message] = state.done
            elif kind == "release":
                _release(rank, state, event, received.get((rank, peer, message)))
            else:
                state.posted.add((peer, message))
    _check_ended(ranks)


def _hand_over(rank: int, state: _Rank, event: Event) -> None:
    """A send to the own rank, or the receive of it."""
    if event.kind == "send":
        if event.message in state.kept:
            raise ProofError(f"rank {rank}, {event.step}: send {event.message} again before it was received")
        state.kept[event.message] = event
    elif state.kept.pop(event.message, None) is None:
        raise ProofError(f"rank {rank}, {event.step}: recv {event.message} comes before this rank has sent it")


def _take(rank: int, state: _Rank, event: Event) -> None:
    if (event.peer, event.message) not in state.posted:
        raise ProofError(
            f"rank {rank}, {event.step}: recv {event.message} awaits what is not posted, or awaited already"
        )
    state.posted.remove((event.peer, event.message))


def _release(rank: int, state: _Rank, event: Event, received: int | None) -> None:
    if (event.peer, event.message) not in state.in_flight:
        raise ProofError(f"rank {rank}, {event.step}: releases {event.message}, which is not sent, or released already")
    if received is None or received > state.clock[event.peer]:
        raise ProofError(
            f"rank {rank}, {event.step}: releases {event.message}, but nothing it has received by then "
            f"shows that rank {event.peer} has taken it"
        )
    state.in_flight.remove((event.peer, event.message))


def _check_ended(ranks: list[_Rank]) -> None:
    stuck = [(rank, state.events[state.done]) for rank, state in enumerate(ranks) if state.done < len(state.events)]
    if stuck:
        waits = [
            f"rank {rank}, {event.step}: recv {event.message} waits for rank {event.peer}" for rank, event in stuck
        ]
        raise ProofError("; ".join(waits) + "; none of them can go on")
    for rank, state in enumerate(ranks):
        for message, event in state.kept.items():
            raise ProofError(f"rank {rank}, {event.step}: send {message} is never received by the rank itself")
        for source, message in sorted(state.posted, key=str):
            raise ProofError(
                f"rank {rank}, {state.events[-1].step}: {message} from rank {source} is posted, never awaited"
            )
