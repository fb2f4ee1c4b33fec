"""What every pipeline rank executes in one step: instructions, bodies and their invocations."""

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


GATHERS: frozenset[Kind] = frozenset({"gather_rows", "gather_sequences", "gather_choices"})  # put rows together


@dataclass(frozen=True)
class Instruction:
    """One statement of a body. `slot` says which of the body's actions it belongs to (0, or 1 in a pair).

    run: segment function `phase` of `site`; counts, dispatch, combine: start an exchange on the communication lane;
    wait: end it (`wait` names what it waits for: counts, dispatch or combine; it reads what the start read, so that
    the exchange's inputs live until then, and writes its results); send never waits; receive awaits a message whose
    buffer an earlier `post` offered; free drops the names it reads. The results of counts are the route of the layer
    (who sends how many rows to whom), which every later exchange of the layer reads, and the offsets. A send to the own
    rank keeps the value for the receive there: its storage changes hands, nothing is copied, posted or released.

    Tensor ranks put the rows of a micro-batch together by `gather_rows`, and take apart what they sum by
    `scatter_rows`, on the communication lane too. Context ranks do so by `gather_sequences` and `scatter_sequences`,
    with the rows of sequences in their order; `gather_choices` puts counts together.

    Where data ranks divide what a segment has (`Plan.sharded`), `gather` starts to put its weights together, on the
    communication lane too; `zeros` makes its accumulators, for one micro-batch; and behind its W `scatter` starts to
    sum these over their holders. The wait for a scatter adds this rank's part of the sums to its gradients.

    `record` adds a value to what the rank has of a metric; `tell` gives a value of a micro-batch to the executor, which
    has it until its next program begins.

    `to_host` of an O copies what the forward of its stage saved to the memory of the host, and is followed by the free
    of it; `from_host` of an R writes the same values again.
    """

    kind: Kind
    slot: int
    action: ActionName  # of the slot
    phase: str  # F, I or W
    site: str = ""  # "L3.attention" of a run, "L17" of an exchange, the metric of a record, the name of what is told
    wait: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[Buffer, ...] = ()
    params: tuple[str, ...] = ()  # tensor names (run only); W reads their gradient accumulators
    weights: tuple[str, ...] = ()  # tensors that W reads itself, behind its accumulators
    params_in: tuple[str, ...] = ()  # for each of `params`, the value read that has it, "": the rank's own; (): all own
    weights_in: tuple[str, ...] = ()  # for each of `weights`, likewise
    peer: int = -1  # pipeline rank of a send or receive; the own one where the neighbouring stage is there too

    @property
    def producer(self) -> ActionName:
        """The action that makes the message which a send gives or a receive awaits."""
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
        """Sends and receives of the body, each with its place."""
        return tuple((at, i) for at, i in enumerate(self.instructions) if i.kind in ("send", "receive"))


class Message(NamedTuple):
    """A tensor between neighbouring stages, named by its producer: `F2.5` the output of stage 2, `B3.1` the input
    gradient of stage 3 (whether a B or an I action made it). A proof looks up a million of them, hence no dataclass."""

    action: ActionName
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.action}.{self.micro_batch}"


class Invocation(NamedTuple):
    """One body on its micro-batches. Before it: `posts` (source rank, message), in the sender's order.

    After it: `releases` (destination rank, message): buffers of sends that are known to have arrived. Sends that no
    invocation releases are drained after the last one, before the reductions.
    """

    body: BodyName
    micro_batches: tuple[int, ...]
    posts: tuple[tuple[int, Message], ...] = ()
    releases: tuple[tuple[int, Message], ...] = ()


@dataclass(frozen=True)
class BucketCollective:
    """A call that all ranks of a group make together.

    sum: a small tensor is summed over the world (the `name` says which: targets, records, norm); max: the largest of
    the world is taken of each of its numbers (logits); reduce: the holders of a bucket wait until its gradients are
    summed; gather: they give one another the weights that each has updated.
    """

    kind: Literal["sum", "max", "reduce", "gather"]
    name: str  # of a reduce or gather: the bucket's
    bucket: Bucket | None = None  # of a reduce or gather

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Program:
    """What every pipeline rank executes in one step (or one evaluation) of `num_micro_batches`.

    A column (one data coordinate) runs one program. Collectives are in one order for all ranks of the world: those of
    `prologue` come before the first body, those of `epilogue` after the last one, those of `update` with the update of
    the weights. A rank leaves out the buckets that it does not hold. Reductions are started in between.
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
    reductions: tuple[tuple[Reduction, ...], ...] = ()  # per pipeline rank, in their order; none in an evaluation

    @property
    def collectives(self) -> tuple[BucketCollective, ...]:
        """All collectives, in their order."""
        return self.prologue + self.epilogue + self.update
