"""Tensors, segments, their cuts into F, I and W, and emitted segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from compiler.ir.dtypes import bytes_at, has_rows, tensor_bytes
from runtime.contract.launches import KernelUse
from runtime.contract.slices import Slice


@dataclass(frozen=True, slots=True)
class Buffer:
    """An abstract tensor. Extents are ints, "R" (rows that an expert rank receives), "R/128" (tiles of R, rounded up),
    "P" (token copies to forward inside the node) or "X" (rows that it forwards).

    `alias` names the value of the same segment whose storage this one shares ("": it owns its storage).
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    alias: str = ""

    def with_name(self, name: str, alias: str = "") -> Buffer:
        """The tensor under another name, sharing the storage of `alias` if given."""
        return Buffer(name, self.shape, self.dtype, alias)

    @property
    def fixed_bytes(self) -> int:
        """Bytes if the shape is static and it owns its storage, else 0."""
        return 0 if self.alias or has_rows(self.shape) else tensor_bytes(self.shape, self.dtype)

    def bytes_at(self, rows: int, copies: int = 0, forwarded: int = 0) -> int:
        """Bytes for these numbers of received rows, copies and forwarded rows; 0 if it does not own its storage."""
        return 0 if self.alias else bytes_at(self.shape, self.dtype, rows, copies, forwarded)

    @property
    def row_bytes(self) -> int:
        """Bytes per received row, rounded up, if the shape depends on R and it owns its storage, else 0."""
        return 0 if self.alias or not has_rows(self.shape) else tensor_bytes(self.shape, self.dtype)


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


# still: a weight that is not trained in this phase of a run but keeps its optimizer state; frozen: one without
# optimizer state; bias: a router's balancing bias, not trained by the optimizer; slots: the slot of each expert in the
# layer; table: the experts of each token id
Role = Literal["parameter", "still", "frozen", "bias", "slots", "table"]


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """How a logical parameter is sharded over tensor ranks: along one dimension, and each of its parts evenly."""

    dimension: int  # of one expert if experts are stacked
    parts: tuple[int, ...]  # a rank's extent of each part of a fused product; one part if it is not fused
    ranks: int

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the logical parameter, if a rank's shard has `shape`."""
        d = self.dimension
        assert shape[d] == sum(self.parts), (shape, self)
        return (*shape[:d], shape[d] * self.ranks, *shape[d + 1 :])

    def slice_of(self, rank: int) -> Slice:
        """The slice that a tensor rank holds: its range of every part."""
        ends = tuple(accumulate(self.ranks * part for part in self.parts))
        firsts = (end - (self.ranks - rank) * part for end, part in zip(ends, self.parts, strict=True))
        return Slice(
            self.dimension, tuple((start, start + part) for start, part in zip(firsts, self.parts, strict=True))
        )


@dataclass(frozen=True, slots=True)
class Param:
    """A weight that a segment reads, by its local name. `stack` > 0: this many experts are stacked in dimension 0."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stack: int = 0
    grad: bool = True  # whether this segment computes a gradient for it; buffers such as the balancing bias have none
    # Nothing that is traced or emitted depends on the following fields, so they do not distinguish segments.
    role: Role = field(default="parameter", repr=False, compare=False)
    init: float | None = field(default=0.0, repr=False, compare=False)  # std of the initial values; None: ones
    uniform: bool = field(default=False, repr=False, compare=False)  # whether initial values are uniform, else normal
    mean: float = field(default=0.0, repr=False, compare=False)  # of the initial values, unless they are ones
    decay: bool = field(default=False, repr=False, compare=False)  # whether weight decay applies to it
    path: str = field(default="", repr=False, compare=False)  # name relative to its block, if the layer has no entry
    split: TensorSplit | None = field(
        default=None, repr=False, compare=False
    )  # how it is sharded; `shape` is that of a shard
    # Rows of each of the matrices stacked in the logical parameter, as published weights have them unfused. () if it is
    # not a matrix of a layer: a vector, the embedding, the head.
    matrices: tuple[int, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class RecomputedValue:
    """An input or output of a segment that is not saved for the backward but recomputed there, as the first result of
    `op(*args)` on parameters, inputs and constants of the segment.
    """

    value: str
    op: str
    args: tuple[str | float, ...]


SUM = "sum"  # in `recompute`, for a layer that is run again: the sum at its beginning is recomputed, too


@dataclass(frozen=True)
class Segment:
    """A pure function of parameters and inputs, between communications: `function(ops, p, *inputs) -> tuple`.

    `p` has one attribute per parameter. Segments with equal `key` are traced once. The function, a frozen value of a
    layer, is part of the key, so that every setting counts. `constants` are the settings that the emitted text shows.
    """

    kind: str
    function: Callable[..., tuple[Any, ...]]
    params: tuple[Param, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: tuple[
        tuple[str, int | float | bool | str | tuple[int | float, ...]], ...
    ] = ()  # settings of the function
    recompute: tuple[str, ...] = ()  # names of what the backward recomputes: compiler/model/segments/recompute.py
    remade: tuple[RecomputedValue, ...] = ()
    stored: tuple[tuple[str, str], ...] = ()  # (value or role, dtype): compiler/model/segments/storage.py
    fused: tuple[str, ...] = ()  # names of fusion passes: compiler/model/segments/fuse.py

    @property
    def recomputes_all(self) -> bool:
        """Whether the backward recomputes the whole segment. `project` and `attend` are the two halves of attention."""
        return {"project": "attention", "attend": "attention"}.get(self.kind, self.kind) in self.recompute

    @cached_property
    def key(self) -> tuple[Any, ...]:
        return (_identity(self.function), *self.emitted_key)

    @property
    def emitted_key(self) -> tuple[Any, ...]:
        """The parts of the key that the emitted text of the segment shows. Emission fails if segments of a build differ
        in anything else."""
        recomputed = (*self.recompute, *self.remade, *self.stored)
        return (self.kind, self.params, self.inputs, self.outputs, self.constants, *recomputed, self.fused)


def _identity(value: Any) -> Any:
    """Return a value that is equal for functions with equal settings. A `partial` only equals itself, so it is replaced
    by its function and arguments, at any depth."""
    if isinstance(value, partial):
        return (value.func, *map(_identity, value.args), *sorted(value.keywords.items()))
    settings = getattr(value, "__dataclass_fields__", None) if callable(value) else None
    if settings is None or isinstance(value, type):
        return value
    return (type(value), *(_identity(getattr(value, name)) for name in settings))


@dataclass(frozen=True, slots=True)
class Signature:
    """Argument and return names of one emitted function, in order.

    Names: parameter `w`, its gradient accumulator `g_w` (W only), input `x`, output `y`, tangent `d_y`,
    input gradient `d_x`, saved and deferred buffers by the names the cut gives them.
    """

    args: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()


class KernelWork(NamedTuple):
    """What the kernels of an op execute on a GPU, where the FLOPs of the model and the op's operands do not tell
    (compiler/model/ops/gpu_work.py)."""

    flops: int  # in the dtype of the op
    bytes: int  # of tensors between its kernels, read and written
    temporary_bytes: int  # of these tensors, most at a time


class TorchWork(NamedTuple):
    """What torch does on a GPU for one call of an op that has no kernel (compiler/model/ops/gpu_work.py)."""

    flops: int  # in FP32
    bytes: int  # read and written by all its kernels
    launches: int
    temporary_bytes: int  # most at a time, with the results


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one call: floating point operations, and bytes read plus written; `_row` per received row.

    `ops`: the cost of each op, in order. Its time depends on the op and on the `shape` and `dtype` of its kernel
    (compiler/machine/rates/table.py), which are set only in these, as are `on_kernels` and `on_torch`: the work of an
    op on a GPU, if its kernels or torch compute it.
    """

    flops: int = 0
    bytes: int = 0
    flops_row: int = 0
    bytes_row: int = 0
    ops: tuple[tuple[str, Cost], ...] = ()
    shape: tuple[int | str, ...] = ()  # ints, or "R" for received rows
    dtype: str = ""
    on_kernels: KernelWork | None = None
    on_torch: TorchWork | None = None


@dataclass(frozen=True, slots=True)
class QuantisedParameter:
    """A parameter that products read quantised, and the tensors of its quantised copy on a device.

    In this order: data and scales, then both of the transposed parameter, which products for input gradients read.
    """

    param: str
    tensors: tuple[Buffer, ...]  # their names begin with the parameter's

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.fixed_bytes for tensor in self.tensors)

    def names_of(self, parameter: str) -> dict[str, str]:
        """Local name → name of each tensor for a parameter: for `layers.0.ffn.up`, up_fp8 → layers.0.ffn.up_fp8."""
        return {tensor.name: parameter + tensor.name.removeprefix(self.param) for tensor in self.tensors}


Inside = tuple[tuple[str, tuple[tuple[int, int], ...]], ...]  # by function: (bytes, bytes per received row)


@dataclass(frozen=True)
class Cut:
    """A segment cut into F, I and W. I or W has an empty signature if it has neither returns nor accumulators."""

    F: Signature  # args: params then inputs; returns: outputs then saved
    I: Signature  # args: params, inputs, outputs, saved (as needed), tangents; returns: d_<input> then deferred
    W: Signature  # args: g_<param>, then inputs, outputs, saved, tangents, deferred (as needed); returns: none
    outputs: tuple[Buffer, ...]
    saved: tuple[Buffer, ...]  # made by F for I or W, beyond inputs and outputs
    gradients: tuple[Buffer, ...]  # d_<input>
    deferred: tuple[Buffer, ...]  # made by I for W, beyond tangents
    costs: tuple[tuple[str, Cost], ...]  # for "F", "I", "W"
    inside: Inside = ()  # peaks of the memory of a call, besides its arguments and results
    quantised: tuple[QuantisedParameter, ...] = ()  # parameters that products read quantised

    def inside_bytes(self, phase: str, rows: int) -> int:
        """The peak memory inside a call of F, I or W for this number of received rows."""
        points = next((points for name, points in self.inside if name == phase), ())
        return max((fixed + row * rows for fixed, row in points), default=0)


@dataclass(frozen=True, slots=True)
class EmittedCall:
    """A call of an op in an emitted segment."""

    function: str  # F, I or W
    op: str
    kernel: str = ""  # its file in kernels/; "" if the reference op always runs, for a `reason`
    parts: tuple[str, ...] = ()  # the ops that a fused op replaces
    saved: int = 0  # bytes that the fused op saves over these
    saved_row: int = 0  # bytes per received row likewise
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SegmentCode:
    """An emitted segment: module `name` (shape-suffixed) with plain functions F, I, W as in its cut."""

    name: str
    source: str
    ops: tuple[str, ...]  # runtime.ops functions it calls, sorted
    kernels: tuple[tuple[str, str], ...] = ()  # (file in kernels/ without suffix, source text)
    calls: tuple[EmittedCall, ...] = ()  # in the order of its functions
    uses: tuple[KernelUse, ...] = ()  # of kernels, each once; without the name of this segment
