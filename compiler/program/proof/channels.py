"""Second pass, over all ranks: one maximal run under zero-buffer rendezvous decides every interleaving.

One run is enough for this reason. The program of a rank is a straight line and names its peers, so whether a rank can
go on depends only on how far the others have come, and no step of one rank stops another that could go on. All maximal
runs therefore end in the same state. If that state is the end of every program, no interleaving can hang; otherwise all
do. A message moves once it is both sent and posted. A send never waits, and a `receive` waits until its message has
moved. There is one channel per ordered pair of ranks, in order at both ends, so its k-th post must be its k-th send.

A rank that sends to itself uses no channel: the send must come before its `receive` in the rank's program.

One column (a data coordinate) stands for all. All columns run one program, so the members of an exchange start the same
exchanges in the same order, and stepping all columns together is one of the possible runs.

A release claims that a message has moved. The claim must hold in every interleaving, so it must follow from the order
of events: the peer's `receive` of the message must lie in the releasing rank's past. Usually the rank has received
something that the peer sent after that receive, which is enough. If not, the rank may know it through other ranks, and
a second run with vector clocks decides.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from compiler.ir import Body, Instruction, Message, Program
from compiler.program.proof.certificate import ProofError
from compiler.schedule.schedule import Schedule
from runtime.contract.names import ActionName

SEND, RECEIVE, RELEASE = range(3)
Exchanged: TypeAlias = tuple[tuple[str, int, ActionName, int], ...]  # (kind, peer, producer, slot)
Event: TypeAlias = "tuple[int, int, MessageChannel, int]"  # kind, message number, its channel, invocation


@dataclass(slots=True, eq=False)
class MessageChannel:
    """A channel between two ranks: its sends and its posts, each in order and with the invocation it is in."""

    source: int
    destination: int
    numbers: dict[tuple[ActionName, int], int] = field(default_factory=dict)  # message of this channel -> its number
    sends: list[int] = field(default_factory=list)
    sent_in: list[int] = field(default_factory=list)
    posts: list[int] = field(default_factory=list)
    posted_in: list[int] = field(default_factory=list)
    heard: int = 0  # how many events of the source the received messages imply


@dataclass
class EventLines:
    """The messages of a program by number, and the events of each rank in order."""

    program: Program
    schedule: Schedule
    channels: dict[tuple[int, int], MessageChannel] = field(default_factory=dict)  # by source and destination
    messages: list[tuple[ActionName, int]] = field(default_factory=list)  # by number: producer and micro-batch
    events: list[list[Event]] = field(default_factory=list)  # by rank
    faults: dict[int, tuple[int, str]] = field(default_factory=dict)  # rank -> (events before its first fault, message)
    ends: list[str] = field(default_factory=list)  # faults that show only at the end of a rank

    def label(self, rank: int, index: int) -> str:
        """Rank and action of an invocation."""
        return f"rank {rank}, {self.schedule.actions[rank][index]}"

    def channel(self, rank: int, index: int, source: int, destination: int, event: str) -> MessageChannel:
        """The channel of an event of a rank; `event` is its text in messages."""
        key = source, destination
        if key not in self.channels:
            peer = destination if rank == source else source
            if not 0 <= peer < len(self.program.bodies) or peer == rank:
                raise ProofError(f"{self.label(rank, index)}: {event} names rank {peer}")
            self.channels[key] = MessageChannel(source, destination)
        return self.channels[key]

    def message(self, number: int) -> Message:
        """The message with a number."""
        return Message(*self.messages[number])


def message_of(instruction: Instruction, micro_batch: int) -> Message:
    """The message that a send or receive moves, named by the action that produces it."""
    return Message(instruction.producer, micro_batch)


def exchanged_messages(body: Body) -> Exchanged:
    """Every message that a body sends or receives."""
    return tuple((i.kind, i.peer, i.producer, i.slot) for _, i in body.messages)


def check_channels(program: Program, schedule: Schedule) -> int:
    """Check that all posts are in the sender's order, that no rank can hang and that releases are safe.

    Returns the number of messages between ranks. Raises ProofError otherwise.
    """
    lines = read_lines(program, schedule)
    for _, channel in sorted(lines.channels.items()):
        _check_order(lines, channel)
    if not _proves_releases(lines):
        _run_with_clocks(lines)
    if lines.ends:
        raise ProofError(lines.ends[0])
    return sum(len(channel.sends) for channel in lines.channels.values())


def read_lines(program: Program, schedule: Schedule) -> EventLines:
    """The messages and events of every rank. Raises ProofError if a message names a rank that does not exist."""
    lines = EventLines(program, schedule)
    for rank, bodies in enumerate(program.bodies):
        lines.events.append(_line(lines, rank, {body.name: exchanged_messages(body) for body in bodies}))
    return lines


def _line(lines: EventLines, rank: int, bodies: dict[str, Exchanged]) -> list[Event]:
    """The events of a rank. Posts are only added to their channels: nothing waits for them."""
    events: list[Event] = []
    messages = lines.messages
    coming: dict[int, MessageChannel] = {}  # by peer
    going: dict[int, MessageChannel] = {}
    posted: set[int] = set()  # not yet awaited
    in_flight: set[int] = set()  # sent, not yet released
    handed_over: dict[Message, int] = {}  # sent to the rank itself and not yet received -> the invocation

    def add_fault(index: int, text: str) -> None:
        lines.faults.setdefault(rank, (len(events), f"{lines.label(rank, index)}: {text}"))

    for index, (body, micro_batches, posts, releases) in enumerate(lines.program.invocations[rank]):
        for peer, message in posts:
            if peer not in coming:
                coming[peer] = lines.channel(rank, index, peer, rank, f"post {message}")
            channel = coming[peer]
            if (number := channel.numbers.get(message)) is None:
                channel.numbers[message] = number = len(messages)
                messages.append(message)
            channel.posts.append(number)
            channel.posted_in.append(index)
            posted.add(number)
        for kind, peer, producer, slot in bodies[body]:
            named = producer, micro_batches[slot]
            if peer == rank:
                if text := _hand_over(kind, Message(*named), index, handed_over):
                    add_fault(index, text)
            elif kind == "send":
                if peer not in going:
                    going[peer] = lines.channel(rank, index, rank, peer, f"send {Message(*named)}")
                channel = going[peer]
                if (number := channel.numbers.get(named)) is None:
                    channel.numbers[named] = number = len(messages)
                    messages.append(named)
                channel.sends.append(number)
                channel.sent_in.append(index)
                in_flight.add(number)
                events.append((SEND, number, channel, index))
            else:
                if peer not in coming:
                    coming[peer] = lines.channel(rank, index, peer, rank, f"receive {Message(*named)}")
                channel = coming[peer]
                if (number := channel.numbers.get(named)) is None:
                    channel.numbers[named] = number = len(messages)
                    messages.append(named)
                events.append((RECEIVE, number, channel, index))
                if number in posted:
                    posted.remove(number)
                else:
                    add_fault(index, f"recv {Message(*named)} has no posted receive, or was awaited already")
        for peer, message in releases:
            if peer not in going:
                going[peer] = lines.channel(rank, index, rank, peer, f"release {message}")
            channel = going[peer]
            number = channel.numbers.get(message, -1)
            if number in in_flight:
                in_flight.remove(number)
                events.append((RELEASE, number, channel, index))
            else:
                add_fault(index, f"releases {message}, which was not sent, or was released already")
    for unreceived, index in handed_over.items():
        lines.ends.append(f"{lines.label(rank, index)}: send {unreceived} is never received by the rank itself")
    for source, channel in coming.items():
        late = sorted(str(lines.message(number)) for number in channel.posts if number in posted)
        last = len(lines.program.invocations[rank]) - 1
        location = lines.label(rank, last)
        lines.ends += [f"{location}: {text} from rank {source} is posted but never awaited" for text in late]
    return events


def _hand_over(kind: str, message: Message, index: int, under_way: dict[Message, int]) -> str:
    """Record a send of the rank to itself, or take it off with its receive. Returns the fault, or ""."""
    if kind == "send":
        is_repeated = message in under_way
        under_way[message] = index
        return f"send {message} again before it was received" if is_repeated else ""
    return "" if under_way.pop(message, None) is not None else f"recv {message} comes before this rank has sent it"


def _check_order(lines: EventLines, channel: MessageChannel) -> None:
    """On a channel the k-th post must be the k-th send."""
    sends, posts = channel.sends, channel.posts
    if sends == posts:
        return
    source, destination, message = channel.source, channel.destination, lines.message
    for k, (send, post) in enumerate(zip(sends, posts, strict=False)):
        if send != post:
            raise ProofError(
                f"{lines.label(destination, channel.posted_in[k])}: posts {message(post)} as message {k} from rank "
                f"{source}, which sends {message(send)} as message {k} (in "
                f"{lines.schedule.actions[source][channel.sent_in[k]]})"
            )
    k = min(len(sends), len(posts))
    if len(sends) > len(posts):
        location = lines.label(source, channel.sent_in[k])
        raise ProofError(f"{location}: send {message(sends[k])} is never posted by rank {destination}")
    location = lines.label(destination, channel.posted_in[k])
    raise ProofError(f"{location}: posts {message(posts[k])}, which rank {source} never sends")


def _proves_releases(lines: EventLines) -> bool:
    """A maximal run. Returns False if the messages that a rank itself received do not prove a release safe."""
    # By message, the number of the rank's event; 0: not yet.
    sent, received = [0] * len(lines.messages), [0] * len(lines.messages)
    waiting: dict[int, int] = {}  # message -> rank
    done = [0] * len(lines.events)
    reverse = {id(channel): lines.channels.get((d, s)) for (s, d), channel in lines.channels.items()}
    runnable = deque(range(len(done)))
    while runnable:
        rank = runnable.popleft()
        events, count = lines.events[rank], done[rank]
        stop, fault = lines.faults.get(rank, (len(events), ""))
        for kind, number, channel, _ in islice(events, count, stop):
            count += 1
            if kind == RECEIVE:
                if not sent[number]:
                    waiting[number] = rank
                    count -= 1
                    break
                if sent[number] > channel.heard:
                    channel.heard = sent[number]
                received[number] = count
            elif kind == SEND:
                sent[number] = count
                if number in waiting:
                    runnable.append(waiting.pop(number))
            else:
                reply = reverse[id(channel)]
                if not received[number] or reply is None or received[number] > reply.heard:
                    return False
        else:
            if fault:
                raise ProofError(fault)
        done[rank] = count
    _check_all_ended(lines, done)
    return True


def _run_with_clocks(lines: EventLines) -> None:
    """A maximal run with a vector clock per rank."""
    clocks = [[0] * len(lines.events) for _ in lines.events]  # how many events of each rank lie in this rank's past
    sent: dict[int, list[int]] = {}  # message -> sender's clock
    received: dict[int, int] = {}  # message -> number of the destination's event
    waiting: dict[int, int] = {}
    runnable = deque(range(len(clocks)))
    while runnable:
        rank = runnable.popleft()
        events, clock = lines.events[rank], clocks[rank]
        stop, fault = lines.faults.get(rank, (len(events), ""))
        for kind, number, channel, index in islice(events, clock[rank], stop):
            if kind == RECEIVE and number not in sent:
                waiting[number] = rank
                break
            clock[rank] += 1
            if kind == RECEIVE:
                clock[:] = map(max, clock, sent[number])
                received[number] = clock[rank]
            elif kind == SEND:
                sent[number] = clock[:]
                if number in waiting:
                    runnable.append(waiting.pop(number))
            elif received.get(number, clock[channel.destination] + 1) > clock[channel.destination]:
                raise ProofError(
                    f"{lines.label(rank, index)}: releases {lines.message(number)}, but nothing it has received by "
                    f"then shows that rank {channel.destination} has taken it"
                )
        else:
            if fault:
                raise ProofError(fault)
    _check_all_ended(lines, [clock[rank] for rank, clock in enumerate(clocks)])


def _check_all_ended(lines: EventLines, done: list[int]) -> None:
    stuck = [(rank, *lines.events[rank][count]) for rank, count in enumerate(done) if count < len(lines.events[rank])]
    waits = [
        f"{lines.label(rank, index)}: recv {lines.message(number)} waits for rank {channel.source}"
        for rank, _, number, channel, index in stuck
    ]
    if waits:
        raise ProofError("; ".join(waits) + "; none of them can go on")
