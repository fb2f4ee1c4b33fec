"""Tensors, segments, their cuts into F, I and W, and what is emitted of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Literal

from compiler.ir.dtypes import extent_at, has_rows, tensor_bytes
from runtime.contract.slices import Slice


@dataclass(frozen=True, slots=True)
class Buffer:
    """An abstract tensor: `shape` holds ints, "R" (rows an expert rank receives) or "R/128" (tiles of R, rounded up),
    "P" or "X" (copies of tokens, and rows, that it forwards inside its node).

    `alias` names the value of the same segment in whose storage this one lives ("" = its own storage).
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    alias: str = ""

    def named(self, name: str, alias: str = "") -> Buffer:
        """The tensor under another name; `alias`: that of the value in whose storage it lives."""
        return Buffer(name, self.shape, self.dtype, alias)

    @property
    def fixed_bytes(self) -> int:
        """Bytes if the shape is static and owns its storage, else 0."""
        return 0 if self.alias or has_rows(self.shape) else tensor_bytes(self.shape, self.dtype)

    def bytes_at(self, rows: int, copies: int = 0, forwarded: int = 0) -> int:
        """Bytes with so many received rows, copies and rows that are forwarded; 0 if the storage is not its own."""
        if self.alias:
            return 0
        return tensor_bytes(tuple(extent_at(each, rows, copies, forwarded) for each in self.shape), self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes per received row, rounded up, if the shape depends on R and the storage is its own, else 0."""
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


# still: a weight that stays as it is in this phase of a run, and keeps its state of the optimizer; frozen: one that
# stays as it is, without; bias: a router's balancing bias, not trained by the optimizer; slots: which place of the
# layer each expert has; table: the experts that each token goes to
Role = Literal["parameter", "still", "frozen", "bias", "slots", "table"]


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """How tensor ranks split a logical parameter: along a dimension, and each of its parts evenly.

    `parts`: what a rank has of each part of a fused product; of a plain one there is one.
    """

    dimension: int  # of one expert where experts are stacked
    parts: tuple[int, ...]
    ranks: int

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the logical parameter of which a rank has `shape`."""
        d = self.dimension
        assert shape[d] == sum(self.parts), (shape, self)
        return (*shape[:d], shape[d] * self.ranks, *shape[d + 1 :])

    def slice_of(self, rank: int) -> Slice:
        """What a tensor rank holds: its place in every part."""
        ends = tuple(accumulate(self.ranks * part for part in self.parts))
        firsts = (end - (self.ranks - rank) * part for end, part in zip(ends, self.parts, strict=True))
        return Slice(self.dimension, tuple((at, at + part) for at, part in zip(firsts, self.parts, strict=True)))


@dataclass(frozen=True, slots=True)
class Param:
    """A weight a segment reads, by its local name. `stack` > 0: that many experts stacked in dimension 0."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stack: int = 0
    grad: bool = True  # False: this segment has no gradient for it; a buffer such as the balancing bias never has one
    # Nothing that is traced or emitted depends on what follows, so segments that differ in it are one.
    role: Role = field(default="parameter", repr=False, compare=False)
    init: float | None = field(default=0.0, repr=False, compare=False)  # deviation of the first values; None: ones
    uniform: bool = field(default=False, repr=False, compare=False)  # whether they are even between two bounds
    mean: float = field(default=0.0, repr=False, compare=False)  # of the first values, unless they are ones
    decay: bool = field(default=False, repr=False, compare=False)  # whether weight decay applies to it
    path: str = field(default="", repr=False, compare=False)  # its name below its block, if the layer's table has none
    split: TensorSplit | None = field(
        default=None, repr=False, compare=False
    )  # `shape` is what a tensor rank has of it
    # Rows of each matrix that lies in the logical parameter, one below another: of published weights, which are not
    # fused. Nothing for what is no matrix of a layer: a vector, the embedding, the head.
    matrices: tuple[int, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Remade:
    """An input or output of a segment that is not kept for the backward, which makes it again: it is the first result
    of `op(*args)` on parameters, inputs and constants of the segment.
    """

    value: str
    op: str
    args: tuple[str | float, ...]


SUM = "sum"  # in `recompute`, of a layer that is run again: a sum in front is made of its parts again, too


@dataclass(frozen=True)
class Segment:
    """A pure function of parameters and inputs, cut at communication. `function(ops, p, *inputs) -> tuple`.

    `p` has one attribute per parameter. Two segments with equal `key` are traced once. The function, a frozen value of
    a layer, is part of the key, so that no setting of it can be forgotten. `constants` are those of its settings that
    the text of the segment shows.
    """

    kind: str
    function: Callable[..., tuple[Any, ...]]
    params: tuple[Param, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: tuple[
        tuple[str, int | float | bool | str | tuple[int | float, ...]], ...
    ] = ()  # whatever else the function closes over
    recompute: tuple[str, ...] = ()  # names of what the backward computes again: compiler/model/segments/recompute.py
    remade: tuple[Remade, ...] = ()
    stored: tuple[tuple[str, str], ...] = ()  # (value or role, dtype): compiler/model/segments/storage.py
    fused: tuple[str, ...] = ()  # passes that make one op of several: compiler/model/segments/fuse.py

    @property
    def repeats(self) -> bool:
        """Whether the backward computes the whole segment again. Context ranks have attention in two."""
        return {"project": "attention", "attend": "attention"}.get(self.kind, self.kind) in self.recompute

    @cached_property
    def key(self) -> tuple[Any, ...]:
        return (_identity(self.function), *self.shown)

    @property
    def shown(self) -> tuple[Any, ...]:
        """The parts that the emitted text of the segment shows, as a key. In a build it is equal where `key` is, else
        the emission fails."""
        again = (*self.recompute, *self.remade, *self.stored)
        return (self.kind, self.params, self.inputs, self.outputs, self.constants, *again, self.fused)


def _identity(value: Any) -> Any:
    """Return a value that is equal for functions with equal settings. A `partial` equals itself alone, so its function
    and arguments stand for it, also where it is a step of a layer."""
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


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one call: floating point operations, and bytes read plus written; `_row` per received row.

    `ops`: that of each op by itself, in order: what they cost depends on which op it is, and on the `shape` and `dtype`
    of its kernel (compiler/machine/rates/table.py), which only these have.
    """

    flops: int = 0
    bytes: int = 0
    flops_row: int = 0
    bytes_row: int = 0
    ops: tuple[tuple[str, Cost], ...] = ()
    shape: tuple[int | str, ...] = ()  # ints, or "R" for received rows
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A parameter that products read in eight bits, and the tensors in which a device holds it so.

    In this order: data and scales, and both of the transposed parameter, which products for input gradients read.
    """

    param: str
    tensors: tuple[Buffer, ...]  # their names begin with that of the parameter

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.fixed_bytes for tensor in self.tensors)

    def names_of(self, parameter: str) -> dict[str, str]:
        """The names of the tensors of a parameter, by their local names: of `layers.0.ffn.up`, up_fp8 →
        layers.0.ffn.up_fp8."""
        return {tensor.name: parameter + tensor.name.removeprefix(self.param) for tensor in self.tensors}


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
    quantised: tuple[Quantised, ...] = ()  # parameters that products read in eight bits

    def inside_bytes(self, phase: str, rows: int) -> int:
        """The most that a call of F, I or W needs inside, for so many received rows."""
        points = next((points for name, points in self.inside if name == phase), ())
        return max((fixed + row * rows for fixed, row in points), default=0)


@dataclass(frozen=True, slots=True)
class Emitted:
    """A call of an op in an emitted segment. `kernel`: its file of kernels/, "" where the reference op always runs;
    then there is a `reason`.

    `parts`: the ops that a fused one stands for; `saved`, `saved_row`: bytes that these would move beyond its own.
    """

    function: str  # F, I or W
    op: str
    kernel: str = ""
    parts: tuple[str, ...] = ()
    saved: int = 0
    saved_row: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SegmentCode:
    """An emitted segment: module `name` (shape-suffixed) with plain functions F, I, W as in its cut."""

    name: str
    source: str
    ops: tuple[str, ...]  # runtime.ops functions it calls, sorted
    kernels: tuple[tuple[str, str], ...] = ()  # (file of kernels/ without suffix, source text)
    calls: tuple[Emitted, ...] = ()  # in the order of its functions
