"""The types of op rules: everything the compiler knows about an op, without torch.

A rule names the op's arguments and outputs in call order, infers the outputs' shapes and dtypes, and states its
gradients as separate ops with the values that each reads: `dgrad` for activations, `apart` for the gradient of an
activation that is computed independently of `dgrad`, `wgrad` for a weight. Argument names are the parameter names of
the reference function (`runtime/ops`); `compiler/model/segments/torch_ops.py` checks this at registration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

from compiler.ir.names import gradient_of

Shape = tuple[Any, ...]  # of int, or "R" in dimension 0

INDEX = "int64"  # tokens, chosen experts, orders, counts
# Optional last arguments of ops that depend on positions: where the document of each row starts, and the position of
# each row. `starts` is left out if each sequence is one document, `positions` if a rank has whole sequences in order.
PLACES = ("starts", "positions")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and dtype of an argument or output."""

    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Extent:
    """A constant argument of a gradient op: the extent of dimension `dim` of the forward's `argument`."""

    argument: str
    dim: int


def no_flops(_: SimpleNamespace) -> int:
    """The FLOPs of ops that only move data."""
    return 0


def elementwise(tensor: str, per_element: int) -> Callable[[SimpleNamespace], int]:
    """FLOPs of an op that does `per_element` operations per element of `tensor`."""
    return lambda sizes: per_element * prod(getattr(sizes, tensor))


@dataclass(frozen=True)
class Gradient:
    """An op of the backward.

    `reads`: its arguments: names of the forward's arguments, outputs or constants, `d_<output>`, or an `Extent`.
    `gives`: the arguments of the forward whose gradients it returns, in order; each has its argument's shape and dtype.
    An empty `op` computes nothing: the gradient of every argument in `gives` is the one tensor in `reads`.
    `flops` and `touched` get the shapes by the names in `reads` and `gives`, with R as a number; `kernel` gets them
    with "R". An empty `kernel_class` means that of the rule.
    """

    op: str
    reads: tuple[str | Extent, ...]
    gives: tuple[str, ...]
    flops: Callable[[SimpleNamespace], int] = no_flops
    touched: Callable[[SimpleNamespace], int] | None = None  # elements read and written, if not all elements
    kernel: Callable[[SimpleNamespace], Shape] | None = None  # extents its rate depends on, if not rows and columns
    kernel_class: str = ""


@dataclass(frozen=True)
class Rule:
    """One op. `infer` gets `Tensor`s and constants in call order and returns a `Tensor` per output.

    A call may leave out its last arguments if they are `optional`; gradients then read none of them.
    The last `hidden` outputs are kept for the backward and not returned to the layer. `differentiable` outputs have
    gradients. A `view` owns no storage: its outputs live in its first argument. `kernel_class` decides which rate the
    op is timed by (compiler/machine/rates/table.py).
    """

    args: tuple[str, ...]
    outputs: tuple[str, ...]
    infer: Callable[..., tuple[Tensor, ...]]
    kernel_class: str
    flops: Callable[[SimpleNamespace], int] = no_flops
    touched: Callable[[SimpleNamespace], int] | None = None
    kernel: Callable[[SimpleNamespace], Shape] | None = None
    optional: tuple[str, ...] = ()
    hidden: int = 0
    differentiable: tuple[str, ...] = ("y",)
    dgrad: Gradient | None = None
    apart: Gradient | None = None
    wgrad: Gradient | None = None
    view: bool = False

    def __post_init__(self) -> None:
        names = {*self.args, *self.outputs}
        assert len(names) == len(self.args) + len(self.outputs), f"a name twice: {self.args}, {self.outputs}"
        for gradient in self.gradients:
            unknown = {read.argument if isinstance(read, Extent) else read for read in gradient.reads} - names
            assert unknown <= {gradient_of(name) for name in self.differentiable}, (
                f"{gradient.op} reads {sorted(unknown)}"
            )
            assert {*gradient.gives} <= {*self.args}, f"{gradient.op} gives {gradient.gives}"
            assert self.args[len(self.args) - len(self.optional) :] == self.optional, f"not last: {self.optional}"
            assert {*self.differentiable} <= {*self.outputs}, f"no outputs: {self.differentiable}"

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        return tuple(gradient for gradient in (self.dgrad, self.apart, self.wgrad) if gradient)

    @property
    def visible(self) -> int:
        """How many outputs, from the first, a layer gets."""
        return len(self.outputs) - self.hidden

    def value_names(self, op: str, occurrence: int) -> tuple[str, ...]:
        """Logical names of the outputs of the `occurrence`-th `op` of a segment: `linear_2`, `rmsnorm_0_rstd`."""
        call = f"{op}_{occurrence}"
        single = self.visible == 1
        return tuple(call if single and index == 0 else f"{call}_{output}" for index, output in enumerate(self.outputs))


def are_places(tensors: tuple[Tensor | None, ...], tokens: int) -> bool:
    """Whether each tensor is None or int32 of shape (tokens,), as `PLACES` are."""
    return all(tensor is None or (tensor.shape == (tokens,) and tensor.dtype == "int32") for tensor in tensors)


def statistics_dtype(dtype: str) -> str:
    """Dtype of row statistics and losses for tensors of `dtype`: at least float32."""
    return "float64" if dtype == "float64" else "float32"
