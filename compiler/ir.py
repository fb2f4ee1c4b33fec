"""Every value that crosses between the compiler's stages, on one page. Frozen, tuples only, no torch.

Segment --cut--> Cut        what F saves for I and W, what I defers to W      (compiler/segments/interpret.py)
Spec    --plan-> Plan       mesh, stages, replica table                       (compiler/plan)
Plan + Schedule --lower--> Program    what each pipeline rank executes        (compiler/lower)

The schedule itself is in compiler/schedules/schedule.py, its alphabet in runtime/actions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

from compiler.dtypes import tensor_bytes
from compiler.holders import Holders

# ---------------------------------------------------------------- tensors and segments


@dataclass(frozen=True, slots=True)
class Buffer:
    """An abstract tensor: `shape` holds ints, or "R" (rows an expert rank receives) in dimension 0.

    `alias` names the value of the same segment in whose storage this one lives ("" = its own storage).
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    alias: str = ""

    @property
    def fixed_bytes(self) -> int:
        """Bytes if the shape is static and owns its storage, else 0."""
        return 0 if self.alias or "R" in self.shape else tensor_bytes(self.shape, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes per received row if dimension 0 is R and the storage is its own, else 0."""
        return 0 if self.alias or "R" not in self.shape else tensor_bytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Input:
    """An activation a segment takes. `grad`: the backward returns `d_<name>` for it."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    grad: bool = True


@dataclass(frozen=True, slots=True)
class Output:
    """An activation a segment returns. `grad`: the backward takes the tangent `d_<name>` for it."""

    name: str
    grad: bool = True


@dataclass(frozen=True, slots=True)
class Param:
    """A weight a segment reads, by its local name. `stack` > 0: that many experts stacked in dimension 0."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stack: int = 0
    grad: bool = True  # False: a buffer such as the balancing bias


@dataclass(frozen=True, slots=True)
class Remade:
    """An input or output of a segment that is not kept for the backward, which makes it again: it is the first result
    of `op(*args)` on parameters, inputs and constants of the segment.
    """

    value: str
    op: str
    args: tuple[str | float, ...]


@dataclass(frozen=True)
class Segment:
    """A pure function of parameters and inputs, cut at communication. `function(ops, p, *inputs) -> tuple`.

    `p` has one attribute per parameter. Two segments with equal `key` are traced once.
    """

    kind: str
    function: Callable[..., tuple[Any, ...]]
    params: tuple[Param, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: tuple[tuple[str, int | float | bool], ...] = ()  # whatever else the function closes over
    recompute: tuple[str, ...] = ()  # names of what the backward computes again: compiler/segments/recompute.py
    remade: tuple[Remade, ...] = ()
    stored: tuple[tuple[str, str], ...] = ()  # (value or role, dtype): compiler/segments/storage.py
    fused: tuple[str, ...] = ()  # passes that make one op of several: compiler/segments/fuse.py

    @property
    def key(self) -> tuple[Any, ...]:
        again = (*self.recompute, *self.remade, *self.stored)
        return (self.kind, self.params, self.inputs, self.outputs, self.constants, *again, self.fused)


@dataclass(frozen=True, slots=True)
class Signature:
    """Argument and return names of one emitted function, in order.

    Names: parameter `w`, its gradient accumulator `g_w` (W only), input `x`, output `y`, tangent `d_y`,
    input gradient `d_x`, saved and deferred buffers by the names the cut gives them.
    """

    args: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one call: floating point operations, and bytes read plus written; `_row` per received row.

    `ops`: that of each op by itself, in order: what they cost depends on which op it is, and on the `shape` and `dtype`
    of its kernel (compiler/rates/kernel_classes.py), which only these have.
    """

    flops: int = 0
    bytes: int = 0
    flops_row: int = 0
    bytes_row: int = 0
    ops: tuple[tuple[str, Cost], ...] = ()
    shape: tuple[int | str, ...] = ()  # ints, or "R" for received rows
    dtype: str = ""


Inside = tuple[tuple[str, tuple[tuple[int, int], ...]], ...]  # by function: (bytes, bytes per received row)


@dataclass(frozen=True)
class Cut:
    """A segment cut into F, I and W. I or W without returns and accumulators has an empty signature."""

    F: Signature  # args: params then inputs; returns: outputs then saved
    I: Signature  # args: params, inputs, outputs, saved (those needed), tangents; returns: d_<input> then deferred
    W: Signature  # args: g_<param>, then inputs, outputs, saved, tangents, deferred (those needed); returns: none
    outputs: tuple[Buffer, ...]
    saved: tuple[Buffer, ...]  # made by F for I or W, beyond inputs and outputs
    gradients: tuple[Buffer, ...]  # d_<input>
    deferred: tuple[Buffer, ...]  # made by I for W, beyond tangents
    costs: tuple[tuple[str, Cost], ...]  # for "F", "I", "W"
    inside: Inside = ()  # what a call needs beside what it takes and returns, at the nodes where that is most

    def inside_bytes(self, phase: str, rows: int) -> int:
        """The most that a call of F, I or W needs inside, for so many received rows."""
        points = next((points for name, points in self.inside if name == phase), ())
        return max((fixed + row * rows for fixed, row in points), default=0)


@dataclass(frozen=True, slots=True)
class Emitted:
    """A call of an op in an emitted segment. `kernel`: its file of kernels/, "" where the reference op always runs.

    `parts`: the ops that a fused one stands for; `saved`, `saved_row`: bytes that these would move beyond its own.
    """

    function: str  # F, I or W
    op: str
    kernel: str = ""
    parts: tuple[str, ...] = ()
    saved: int = 0
    saved_row: int = 0


@dataclass(frozen=True, slots=True)
class SegmentCode:
    """An emitted segment: module `name` (shape-suffixed) with plain functions F, I, W as in its cut."""

    name: str
    source: str
    ops: tuple[str, ...]  # runtime.ops functions it calls, sorted
    kernels: tuple[tuple[str, str], ...] = ()  # (file of kernels/ without suffix, source text)
    calls: tuple[Emitted, ...] = ()  # in the order of its functions


# ---------------------------------------------------------------- stages


@dataclass(frozen=True)
class Use:
    """A segment at a place: local names bound to the stage's values and to logical parameters."""

    site: str  # "L3.attention"; unique in the model
    segment: Segment
    params: tuple[tuple[str, str], ...]  # (local name, tensor name), e.g. ("up", "layers.3.ffn.experts.up")
    inputs: tuple[str, ...]  # stage values, in the segment's order
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Communication:
    """An all-to-all between segments.

    dispatch: (rows, gate, counts) -> (rows_R, gate_R, offsets_G); combine: y_R -> y. With one expert rank nothing
    moves: what comes is what was sent, so the outputs alias the inputs, and gradients those of the outputs.
    """

    kind: Literal["dispatch", "combine"]
    site: str  # "L17"
    axis: str  # mesh axis, "ep"
    inputs: tuple[str, ...]
    outputs: tuple[Buffer, ...]
    sizes: tuple[Buffer, ...]  # the inputs' buffers, for memory and cost
    back: str = ""  # dtype of the gradients of rows, where it is not that of the rows

    def gradient(self, buffer: Buffer) -> Buffer:
        """The gradient of one of its inputs or outputs, as the backward of the exchange sends it."""
        dtype = self.back if self.back and len(buffer.shape) > 1 else buffer.dtype
        alias = next((f"d_{output.name}" for output in self.outputs if output.alias == buffer.name), "")
        return Buffer(f"d_{buffer.name}", buffer.shape, dtype, alias)


@dataclass(frozen=True)
class Stage:
    """A list of segments and communications. `loads` are data tensors, `input`/`output` what neighbours exchange."""

    index: int
    steps: tuple[Use | Communication, ...]
    loads: tuple[Buffer, ...]  # tokens, targets, mtp_tokens, mtp_targets
    input: Buffer | None  # None on the first stage
    output: Buffer | None  # None on the last stage
    records: tuple[tuple[str, str], ...]  # (metric, value): ("loss", …), ("mtp_loss", …), ("load L3", …), …
    tangents: tuple[tuple[str, str], ...]  # (value, constant): the gradient of a loss output is a constant of the step


# ---------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes pp dp ep tp cp. world = pp·dp·tp·cp; ep divides dp. World ranks are pp-major, ep innermost."""

    pp: int
    dp: int
    ep: int
    tp: int = 1
    cp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp * self.cp

    def rank(self, pp: int, dp: int) -> int:
        return pp * self.dp + dp

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(pipeline rank, data rank); the expert coordinate is data rank % ep."""
        return divmod(rank, self.dp)


# bias: a router's balancing bias, not trained by the optimizer; slots: which place of the layer each expert has
Role = Literal["parameter", "bias", "slots"]


@dataclass(frozen=True, slots=True)
class Replica:
    """One row of the replica table: a logical parameter and who holds it."""

    name: str  # layers.3.ffn.experts.17.up
    tensor: str  # layers.3.ffn.experts.up: what segments take; experts of a rank are stacked in it
    shape: tuple[int, ...]
    role: Role
    init: float | None  # standard deviation; None: ones; a bias starts at zero
    decay: bool
    holders: Holders

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Parameters with the same holders: one flat buffer, one reduction. Named by its first parameter."""

    name: str
    holders: Holders
    replicas: tuple[str, ...]  # logical names, decayed ones first, experts of one tensor adjacent


@dataclass(frozen=True)
class Plan:
    """Who holds what, which segments each stage runs, and how each of them is cut."""

    mesh: Mesh
    placement: str  # of the schedule: bidirectional, loop(1), …
    stages: tuple[Stage, ...]
    cuts: Mapping[str, Cut] = field(repr=False)  # by site of use; equal segments share one
    replicas: tuple[Replica, ...]
    buckets: tuple[Bucket, ...]
    assumptions: tuple[str, ...] = ()
    slots: tuple[tuple[str, tuple[int, ...]], ...] = ()  # (tensor, place of each expert) of layers that are placed

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """The segments of all stages at their places, in the order of the model."""
        return tuple(step for stage in self.stages for step in stage.steps if isinstance(step, Use))

    @property
    def cuts_by_key(self) -> dict[Hashable, Cut]:
        """The cut of each distinct segment, by its key."""
        return {use.segment.key: self.cuts[use.site] for use in self.uses}


# ---------------------------------------------------------------- program

Kind = Literal["load", "receive", "run", "counts", "dispatch", "combine", "wait", "send", "record", "constant", "free"]


@dataclass(frozen=True)
class Instruction:
    """One statement of a body. `slot` says which of the body's actions it belongs to (0, or 1 in a pair).

    run: segment function `phase` of `site`; counts, dispatch, combine: start an exchange on the communication lane;
    wait: end it (`wait` names what it waits for: counts, dispatch or combine; it reads what the start read, so that
    the exchange's inputs live until then, and writes its results); send never waits; receive awaits a message whose
    buffer an earlier `post` offered; free drops the names it reads. The results of counts are the route of the layer
    (who sends how many rows to whom), which every later exchange of the layer reads, and the offsets. A send to the own
    rank keeps the value for the receive there: its storage changes hands, nothing is copied, posted or released.
    """

    kind: Kind
    slot: int
    action: str  # of the slot, without micro-batch: "F3", "B4", "I4", "W4"
    phase: str  # F, I or W
    site: str = ""  # "L3.attention" of a run, "L17" of an exchange, the metric of a record
    wait: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[Buffer, ...] = ()
    params: tuple[str, ...] = ()  # tensor names (run only); W reads their gradient accumulators
    weights: tuple[str, ...] = ()  # tensors that W reads itself, behind its accumulators
    peer: int = -1  # pipeline rank of a send or receive; the own one where the neighbouring stage is there too


@dataclass(frozen=True)
class Body:
    """The instructions of one distinct action or pair on one pipeline rank."""

    name: str  # "F0", "I1", "F0_B1", "E0" (forward of evaluation)
    actions: tuple[str, ...]  # ("F0",), ("F0", "B1")
    instructions: tuple[Instruction, ...]

    @cached_property
    def messages(self) -> tuple[tuple[int, Instruction], ...]:
        """Sends and receives of the body, each with its place."""
        return tuple((at, i) for at, i in enumerate(self.instructions) if i.kind in ("send", "receive"))


class Message(NamedTuple):
    """A tensor between neighbouring stages, named by its producer: `F2.5` the output of stage 2, `B3.1` the input
    gradient of stage 3 (whether a B or an I action made it). A proof looks up a million of them, hence no dataclass."""

    action: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.action}.{self.micro_batch}"


class Invocation(NamedTuple):
    """One body on its micro-batches. Before it: `posts` (source rank, message), in the sender's order.

    After it: `releases` (destination rank, message): buffers of sends that are known to have arrived. Sends that no
    invocation releases are drained after the last one, before the reductions.
    """

    body: str
    micro_batches: tuple[int, ...]
    posts: tuple[tuple[int, Message], ...] = ()
    releases: tuple[tuple[int, Message], ...] = ()


@dataclass(frozen=True)
class Program:
    """What every pipeline rank executes in one step (or one evaluation) of `num_micro_batches`.

    A column (one data coordinate) runs one program; `reduces` are world-level, in order, after the last body.
    """

    name: str  # the schedule's name, or "evaluate"
    num_micro_batches: int
    placement: str
    bodies: tuple[tuple[Body, ...], ...]  # per pipeline rank
    invocations: tuple[tuple[Invocation, ...], ...]  # per pipeline rank
    message: Buffer | None  # shape and dtype of every pipeline message
    reduces: tuple[Bucket, ...] = ()
