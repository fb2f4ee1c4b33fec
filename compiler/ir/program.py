"""The program of a step for every pipeline rank: instructions, bodies and their invocations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from compiler.ir.plan import Bucket
from compiler.ir.segment import Buffer
from compiler.ir.stage_placement import StagePlacement
from runtime.contract.names import ActionName, BodyName
from runtime.contract.programs import Reduction

Kind = Literal[
    "load", "receive", "run", "counts", "dispatch", "combine", "gather_rows", "scatter_rows", "gather_sequences",
    "scatter_sequences", "gather_choices", "gather", "zeros", "scatter", "wait", "send", "record", "tell", "constant",
    "to_host", "from_host", "free",
]  # fmt: skip


GATHERS: frozenset[Kind] = frozenset({"gather_rows", "gather_sequences", "gather_choices"})  # all-gather rows


@dataclass(frozen=True)
class Instruction:
    """One statement of a body. `slot`: the index of the body's action that it belongs to (0, or 1 in a pair).

    - run: calls segment function `phase` of `site`.
    - counts, dispatch, combine: start an exchange on the communication lane. The results of counts are the offsets and
      the route of the layer (how many rows each rank sends to each), which every later exchange of the layer reads.
    - gather_rows, scatter_rows: start an all-gather or reduce-scatter of a micro-batch's rows over tensor ranks, on the
      communication lane. gather_sequences, scatter_sequences: the same over context ranks, with rows in sequence order.
      gather_choices: all-gather of counts.
    - gather, zeros, scatter: for tensors that are sharded over data ranks (`Plan.sharded`), start the all-gather of a
      segment's weights on the communication lane; create its gradient accumulators for one micro-batch; and after its
      W, start the reduce-scatter of these. The wait for a scatter adds this rank's shard to its gradients.
    - wait: ends an exchange; `wait` names its kind. It reads what the start read, so that the inputs of the exchange
      live until then, and writes the results.
    - send: never waits. A send to the own rank passes the value's storage on to the receive there; nothing is copied,
      posted or released.
    - receive: awaits a message whose buffer an earlier `post` offered.
    - record: adds a value to the rank's sum of a metric. tell: passes a value of a micro-batch to the executor, which
      keeps it until its next program begins.
    - to_host: in an O action, copies the saved values of its stage's forward to host memory; their free follows.
      from_host: in an R action, copies them back.
    - free: drops the names that it reads.
    """

    kind: Kind
    slot: int
    action: ActionName  # of the slot
    phase: str  # F, I or W
    site: str = ""  # "L3.attention" of a run, "L17" of an exchange, the metric of a record, the name of a told value
    wait: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[Buffer, ...] = ()
    params: tuple[str, ...] = ()  # tensor names (run only); W reads their gradient accumulators
    weights: tuple[str, ...] = ()  # tensors that W reads itself, after its accumulators
    params_in: tuple[str, ...] = ()  # per `params`: the gathered value that has it, "" for the rank's own; (): all own
    weights_in: tuple[str, ...] = ()  # for each of `weights`, likewise
    peer: int = -1  # pipeline rank of a send or receive; the own rank if it also has the neighbouring stage

    @property
    def producer(self) -> ActionName:
        """The action that produces the message of a send or receive."""
        forward, stage = self.phase == "F", self.action.stage
        if self.kind == "receive":
            stage += -1 if forward else 1
        return ActionName.of("F" if forward else "B", stage)


@dataclass(frozen=True)
class Body:
    """The instructions of one distinct action or pair on one pipeline rank."""

    name: BodyName  # a forward of an evaluation is an E here, and an F in its actions
    actions: tuple[ActionName, ...]
    instructions: tuple[Instruction, ...]

    @cached_property
    def messages(self) -> tuple[tuple[int, Instruction], ...]:
        """The sends and receives of the body, with their indices."""
        return tuple(
            (index, instruction)
            for index, instruction in enumerate(self.instructions)
            if instruction.kind in ("send", "receive")
        )


class Message(NamedTuple):
    """A tensor between neighbouring stages, named by its producer: `F2.5` is the output of stage 2 for micro-batch 5,
    `B3.1` the input gradient of stage 3 (from a B or an I action). Not a dataclass: a proof looks up a million of
    them."""

    action: ActionName
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.action}.{self.micro_batch}"


class Invocation(NamedTuple):
    """One body on its micro-batches. Before it runs, receive buffers are offered: `posts` (source rank, message), in
    the sender's order.

    After it, the buffers of sends that are known to have arrived are released: `releases` (destination rank, message).
    Sends that no invocation releases are drained after the last one, before the reductions.
    """

    body: BodyName
    micro_batches: tuple[int, ...]
    posts: tuple[tuple[int, Message], ...] = ()
    releases: tuple[tuple[int, Message], ...] = ()


@dataclass(frozen=True)
class BucketCollective:
    """A collective call of all ranks of a group.

    sum: all-reduce of a small tensor over the world (`name`: targets, records, norm); max: all-reduce by maximum
    (logits); reduce: wait for the reduction of a bucket's gradients; gather: all-gather of a bucket's updated weights.
    """

    kind: Literal["sum", "max", "reduce", "gather"]
    name: str  # for a reduce or gather: that of the bucket
    bucket: Bucket | None = None  # for a reduce or gather

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Program:
    """The program of one step (or one evaluation) of `num_micro_batches`, for every pipeline rank.

    All columns (data coordinates) run the same program. All ranks of the world call collectives in the same order:
    those of `prologue` before the first body, those of `epilogue` after the last one, those of `update` with the weight
    update. A rank skips buckets that it does not hold. Reductions are started between bodies.
    """

    name: str  # the schedule's name, or "evaluate"
    num_micro_batches: int
    stage_placement: StagePlacement
    bodies: tuple[tuple[Body, ...], ...]  # per pipeline rank
    invocations: tuple[tuple[Invocation, ...], ...]  # per pipeline rank
    message: Buffer | None  # shape and dtype of every pipeline message
    prologue: tuple[BucketCollective, ...] = ()
    epilogue: tuple[BucketCollective, ...] = ()
    update: tuple[BucketCollective, ...] = ()
    reductions: tuple[tuple[Reduction, ...], ...] = ()  # per pipeline rank, in order; none in an evaluation

    @property
    def collectives(self) -> tuple[BucketCollective, ...]:
        """All collectives, in order."""
        return self.prologue + self.epilogue + self.update
