"""Lower a plan and schedules to programs: one body per distinct action or pair and rank, invoked as scheduled.

`Lowering` holds the stages of a plan on the devices of its pipeline ranks. Programs, predicted times, the costs of a
schedule search and memory all take their instructions from one `Lowering`, which makes each chain and body once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

from compiler.ir import Body, BucketCollective, Buffer, Instruction, Invocation, Kind, Message, Plan, Program
from compiler.plan.actions.chains import Chains
from compiler.plan.actions.order import Orders, finish, interleave
from compiler.plan.spec_rates import OnRanks, core_rates, kinds_of, rates_by_rank
from compiler.schedule.schedule import Schedule
from runtime.contract import Reduction
from runtime.contract.actions import Action, Step, actions_of, is_copy
from runtime.contract.names import ActionName, BodyKind, BodyName

# --- The collectives of a program: sums over the world, and the reductions and gathers of each bucket
#
# Before the first forward, ranks count the valid targets, which normalise the loss. After the last backward they sum
# the records (losses, and the load of every expert) and, if logits are clipped, find the largest ones. They wait for
# the reductions of gradients, which run under the backward (see `reductions_of`), and sum the squares of all gradients
# for the clipping of their norm. Where each holder of a bucket updates a part of it, the holders gather the rest.
# Sharded gradients are reduced by the bodies that make them, and sharded weights are gathered by the bodies that read
# them (compiler/plan/actions/chains.py); of these, only the copies of a shard on several pipeline ranks remain here.

TARGETS, RECORDS, NORM = (BucketCollective("sum", name) for name in ("targets", "records", "norm"))
LOGITS = BucketCollective("max", "logits")


class Collectives(TypedDict):
    """The fields of a `Program` that hold its collectives."""

    prologue: tuple[BucketCollective, ...]
    epilogue: tuple[BucketCollective, ...]
    update: tuple[BucketCollective, ...]


def collectives_of(plan: Plan, *, trains: bool) -> Collectives:
    """The collectives of a training step, or of an evaluation, which has no gradients.

    An evaluation gathers weights if it is repeated with their moving average: once to load the average, and once to
    restore the weights.
    """
    reduces = (BucketCollective("reduce", bucket.name, bucket) for bucket in plan.buckets if bucket.is_reduced)
    shared = [b for b in plan.buckets if len(b.holders) > 1 and not b.is_still]
    parted = [b for b in shared if plan.zero and (plan.zero < 3 or b.is_reduced)]
    gathers = tuple(BucketCollective("gather", bucket.name, bucket) for bucket in parted)
    if not trains:
        return {"prologue": (TARGETS,), "epilogue": (RECORDS,), "update": gathers if plan.evaluates_average else ()}
    return {
        "prologue": (TARGETS,),
        "epilogue": (RECORDS, *((LOGITS,) if plan.clips_logits else ()), *reduces, NORM),
        "update": gathers,
    }


# --- When each rank starts to reduce the gradients of its buckets: as soon as nothing more is added to them
#
# A bucket's gradients on a rank are complete after the rank's last weight gradient of the bucket's stages. Buckets with
# the same holders share a channel, so all their pipeline ranks must start them in one order: the order in which the
# slowest of these ranks is ready. A start never waits, so reductions overlap with the rest of the backward (PyTorch
# DDP, arXiv 2006.15704, §3.2).

Stages = tuple[int, ...]


def reductions_of(plan: Plan, steps: Sequence[Sequence[Step]]) -> tuple[tuple[Reduction, ...], ...]:
    """The reductions of every pipeline rank, whose invocations run its `steps`.

    Unless the plan overlaps reductions with the backward, all of them start after the last step.
    """
    shared: dict[tuple[int, ...], set[Stages]] = defaultdict(set)  # stages of buckets, by the pipeline ranks of holders
    for bucket in plan.buckets:
        if bucket.is_reduced:
            shared[bucket.holders.pipeline_ranks].add(bucket.stages)
    last_steps = [_last_weight_gradients(row, plan.stages_of(rank)) for rank, row in enumerate(steps)]
    reductions: list[list[Reduction]] = [[] for _ in steps]
    for ranks, groups in sorted(shared.items()):
        places = {g: {rank: max(last_steps[rank].get(s, 0) for s in g) for rank in ranks} for g in groups}
        steps_left = {
            g: min(len(steps[rank]) - index for rank, index in of_rank.items()) for g, of_rank in places.items()
        }
        after = dict.fromkeys(ranks, 0)
        for stages in sorted(groups, key=lambda g: (-steps_left[g], g)):
            for rank in ranks:
                earliest = places[stages][rank] if plan.overlap_reduce else len(steps[rank]) - 1
                after[rank] = max(after[rank], earliest)
                reductions[rank].append(Reduction(after[rank], stages))
    return tuple(tuple(sorted(row, key=lambda reduction: reduction.after)) for row in reductions)


def _last_weight_gradients(steps: Sequence[Step], stages: Collection[int]) -> dict[int, int]:
    """By stage, the index of the last step that adds to its gradients."""
    missing, last = set(stages), dict[int, int]()
    for index in range(len(steps) - 1, -1, -1):
        if not missing:
            break
        for action in actions_of(steps[index]):
            if action.kind in "BW" and action.stage in missing:
                last[action.stage] = index
                missing.remove(action.stage)
    return last


# --- Calls of bodies → invocations: which receives a rank posts before each, and which send buffers it releases after
#
# Each ordered pair of communicating ranks has one channel. Its messages are in the order in which the sender's bodies
# produce them. Receives are posted in that order, one invocation before they are awaited, so both ends of a channel
# agree on its order under every placement. Nothing waits for a send: its buffer is released once the rank has received
# something that the peer sent after it took the message.
#
# Two consecutive stages on one rank (the bottom of a V, or a pipeline of one rank) pass their messages inside the rank:
# a send to the rank itself, with neither post nor release. The value moves, and its storage stays.

Point = tuple[int, int]  # (invocation, position in it)
Ends = tuple[tuple[int, Message], ...]  # posts or releases of an invocation
Call = tuple[BodyName, tuple[int, ...]]  # body, micro-batches


@dataclass(slots=True)
class _SentChannel:
    """A channel from one rank to another: its messages in the order sent, and where each is sent and awaited."""

    messages: list[Message] = field(default_factory=list)
    sent: list[Point] = field(default_factory=list)
    awaited: list[Point] = field(default_factory=list)
    place: dict[tuple[str, int], int] = field(default_factory=dict)  # message -> its index in `messages`
    order: list[tuple[int, int]] = field(default_factory=list)  # (invocation that awaits, place), in the order awaited


Talk = Sequence[tuple[_SentChannel, int, ActionName, int]]  # (channel, position in the body, producer, slot)


def invocations_of(
    bodies: Sequence[Sequence[Body]], calls: Sequence[Sequence[Call]]
) -> tuple[tuple[Invocation, ...], ...]:
    """The invocations of every pipeline rank, from its bodies and its calls of them in order."""
    channels: list[dict[int, _SentChannel]] = [
        defaultdict(_SentChannel) for _ in calls
    ]  # by source, then by destination
    exchanged = [
        {body.name: _sent_and_received(rank, body, channels) for body in row} for rank, row in enumerate(bodies)
    ]
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


def _sent_and_received(rank: int, body: Body, channels: Sequence[dict[int, _SentChannel]]) -> tuple[Talk, Talk]:
    """The messages that a body sends to other ranks, and those that it receives from them."""
    sends: list[tuple[_SentChannel, int, ActionName, int]] = []
    receives: list[tuple[_SentChannel, int, ActionName, int]] = []
    for position, i in body.messages:
        if i.peer != rank:
            if i.kind == "send":
                sends.append((channels[rank][i.peer], position, i.producer, i.slot))
            else:
                receives.append((channels[i.peer][rank], position, i.producer, i.slot))
    return sends, receives


def _post(channel: _SentChannel, source: int, before: list[Ends]) -> None:
    """Before each invocation of the receiver, post all messages up to the one that the next invocation awaits."""
    posted = 0
    for index, place in channel.order:
        if place >= posted:
            before[max(index - 1, 0)] += tuple([(source, message) for message in channel.messages[posted : place + 1]])
            posted = place + 1


def _release(channel: _SentChannel, back: _SentChannel, destination: int, after: list[Ends]) -> None:
    """Release each message after the sender's invocation that implies its arrival; `back` is the reverse channel.

    Replies may be awaited in another order than they are sent, so they are searched in the order awaited.
    """
    replies = sorted(back.order)
    count, earliest = len(replies), 0  # the first reply that the rank awaits after the message's invocation
    for message, (index, _), awaited in zip(channel.messages, channel.sent, channel.awaited, strict=True):
        first = bisect_right(back.sent, awaited)  # the first reply sent after this message was taken
        while earliest < count and replies[earliest][0] <= index:
            earliest += 1
        k = earliest
        while k < count and replies[k][1] < first:
            k += 1
        if k < count:
            after[replies[k][0]] += ((destination, message),)


# --- lowering

Peers = tuple[tuple[int, int], ...]  # for each slot, the pipeline ranks of the previous and the next stage


class Lowering:
    """The stages of a plan on the devices of its pipeline ranks. Makes each of their chains and bodies once."""

    def __init__(self, plan: Plan, rates: OnRanks | None = None, orders: Orders | None = None) -> None:
        """`rates`: one for all pipeline ranks, or one for each; None for those of a CPU core.

        The order of a body's instructions depends on the rates of its device. `orders` finds and caches these orders.
        """
        self.plan = plan
        self.rates = rates_by_rank(rates or core_rates(), plan.mesh.pp)
        self.kinds = kinds_of(self.rates)  # for each rank, the first rank on the same kind of device
        self.orders = orders or Orders()
        self._chains: dict[tuple[int, int], Chains] = {}  # by stage and kind of device
        self._bodies: dict[tuple[BodyName, int], Body] = {}  # by name and kind of device, without peers
        self._on_ranks: dict[tuple[BodyName, int, Peers], Body] = {}
        self._collectives_of: dict[bool, Collectives] = {}  # by whether a program trains

    def chains(self, stage: int, rank: int) -> Chains:
        """The chains of a stage on the device of a pipeline rank."""
        kind = self.kinds[rank]
        if (stage, kind) not in self._chains:
            plan, rates = self.plan, self.rates[kind]
            self._chains[stage, kind] = Chains(plan.stages[stage], plan.cuts, rates, plan.sharded)
        return self._chains[stage, kind]

    def program(self, schedule: Schedule, evaluate: bool = False) -> Program:
        """The program of a schedule on the plan's stages. `evaluate`: forwards keep nothing for a backward."""
        assert schedule.num_ranks == len(self.rates), "a schedule has the plan's pipeline ranks"
        names = _BodyNames(evaluate)
        calls = [[names.call(step) for step in steps] for steps in schedule.actions]
        bodies = tuple(self._rank_bodies(schedule, calls[rank], rank) for rank in range(schedule.num_ranks))
        return Program(
            name="evaluate" if evaluate else schedule.name,
            num_micro_batches=schedule.num_micro_batches,
            stage_placement=schedule.stage_placement,
            bodies=bodies,
            invocations=invocations_of(bodies, calls),
            message=next((stage.output for stage in self.plan.stages if stage.output), None),
            **self._collectives(not evaluate),
            reductions=() if evaluate else reductions_of(self.plan, schedule.actions),
        )

    def _collectives(self, trains: bool) -> Collectives:
        """The collectives of programs that train, or of those that do not: one value, which a proof checks once."""
        if trains not in self._collectives_of:
            self._collectives_of[trains] = collectives_of(self.plan, trains=trains)
        return self._collectives_of[trains]

    def _rank_bodies(self, schedule: Schedule, calls: Sequence[Call], rank: int) -> tuple[Body, ...]:
        """The bodies of a rank, by name."""
        bodies: dict[BodyName, Body] = {}
        peers_of: dict[str, Peers] = {}
        turn = schedule.turn
        directions = [(name, tuple([k >= turn for k in micro_batches])) for name, micro_batches in calls]
        # The peers of a body depend only on the directions of its micro-batches.
        for (name, _), step in dict(zip(directions, schedule.actions[rank], strict=True)).items():
            peers = tuple(_neighbours(schedule, action) for action in actions_of(step))
            assert peers_of.setdefault(name, peers) == peers, f"{name} on rank {rank} has more than one pair of peers"
            if name not in bodies:
                bodies[name] = self._body_on(step, name, rank, peers)
        return tuple(bodies[name] for name in sorted(bodies))

    def _body_on(self, step: Step, name: BodyName, rank: int, peers: Peers) -> Body:
        """A body with its peers. Bodies of the two directions of a schedule differ only in their peers."""
        key = name, self.kinds[rank], peers
        if key not in self._on_ranks:
            if key[:2] not in self._bodies:
                self._bodies[key[:2]] = self._body(step, name, rank)
            self._on_ranks[key] = _add_peers(self._bodies[key[:2]], peers)
        return self._on_ranks[key]

    def _body(self, step: Step, name: BodyName, rank: int) -> Body:
        actions = tuple(ActionName.of(action.kind, action.stage) for action in actions_of(step))
        if isinstance(step, Action) and is_copy(step):
            return Body(name, actions, copy_instructions(step, self.chains(step.stage, rank).offloaded_values()))
        chains = [(self.chains(action.stage, rank), action.kind) for action in actions_of(step)]
        order = interleave([of_stage.chain(kind) for of_stage, kind in chains], self.orders)
        evaluates = name.actions[0].kind == EVALUATION
        read_later = [frozenset() if evaluates else of_stage.read_later(kind) for of_stage, kind in chains]
        return Body(name, actions, finish(order, actions, read_later))


def copy_instructions(action: Action, saved: Sequence[Buffer]) -> tuple[Instruction, ...]:
    """The instructions of an O or an R."""
    name = ActionName.of(action.kind, action.stage)
    if action.kind == "R":
        return (Instruction("from_host", 0, name, "F", writes=tuple(saved)),)
    names = tuple(buffer.name for buffer in saved)
    kinds: tuple[Kind, ...] = ("to_host", "free") if names else ("to_host",)  # an embedding saves nothing
    return tuple(Instruction(kind, 0, name, "F", reads=names) for kind in kinds)


EVALUATION: BodyKind = "E"  # in names of bodies: E0 is F0 in an evaluation, which keeps nothing for a backward


def body_name(step: Step, evaluate: bool = False) -> BodyName:
    """The name of a step's body, from the kinds and stages of its actions. `evaluate`: all are forwards, named E."""
    kinds = ((EVALUATION if evaluate else action.kind, action.stage) for action in actions_of(step))
    return BodyName.of(*(ActionName.of(*pair) for pair in kinds))


class _BodyNames:
    """The names of bodies; each is built once, however many micro-batches the body runs on."""

    def __init__(self, evaluate: bool) -> None:
        self._evaluate = evaluate
        self._names: dict[tuple[str | int, ...], BodyName] = {}  # by kinds and stages

    def call(self, step: Step) -> Call:
        """The name of the body of a step, and its micro-batches."""
        key: tuple[str | int, ...]
        micro_batches: tuple[int, ...]
        if isinstance(step, Action):
            key, micro_batches = (step.kind, step.stage), (step.micro_batch,)
        else:
            a, b = step.first, step.second
            key, micro_batches = (a.kind, a.stage, b.kind, b.stage), (a.micro_batch, b.micro_batch)
        if key not in self._names:
            self._names[key] = body_name(step, self._evaluate)
        return self._names[key], micro_batches


def _add_peers(body: Body, peers: Peers) -> Body:
    """The body with its peers: forwards come from the first of a slot's peers, backwards from the second."""

    def with_peer(i: Instruction) -> Instruction:
        if i.kind not in ("send", "receive"):
            return i
        before, after = peers[i.slot]
        return replace(i, peer=before if (i.kind == "receive") == (i.phase == "F") else after)

    return replace(body, instructions=tuple(map(with_peer, body.instructions)))


def _neighbours(schedule: Schedule, action: Action) -> tuple[int, int]:
    """The pipeline ranks of the stages before and after an action's stage; -1 where there is none."""

    def rank(stage: int) -> int:
        return schedule.rank_of(stage, action.micro_batch) if 0 <= stage < schedule.num_stages else -1

    return rank(action.stage - 1), rank(action.stage + 1)
