"""What a rule is: every fact of an op, without torch.

A rule names the op's arguments and outputs in call order, infers the outputs' shapes and dtypes, and states its
gradients as separate ops: `dgrad` for those of activations, `apart` for one of them that needs nothing the others do,
`wgrad` for that of a weight, each with what it reads. Its names are those of the reference function's parameters
(`runtime/ops`), which is checked where the op is given to torch (`compiler/model/segments/torch_ops.py`).
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
# The last arguments of ops that know where rows stand in their sequences: where the document of a row begins, and the
# position of a row. Left out where a sequence is one document, and where all its rows are there in their order.
PLACES = ("starts", "positions")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and dtype of an argument or output."""

    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Extent:
    """A constant a gradient op takes: the extent of dimension `dim` of the forward's argument `of`."""

    of: str
    dim: int


def no_flops(_: SimpleNamespace) -> int:
    """The FLOPs of ops that only move data."""
    return 0


def elementwise(tensor: str, per_element: int) -> Callable[[SimpleNamespace], int]:
    """FLOPs of an op that does `per_element` operations for each element of `tensor`."""
    return lambda sizes: per_element * prod(getattr(sizes, tensor))


@dataclass(frozen=True)
class Gradient:
    """An op of the backward.

    `reads`: its arguments: names of the forward's arguments, outputs or constants, `d_<output>`, or an `Extent`.
    `gives`: the arguments of the forward whose gradients it returns, in order; each has its argument's shape and dtype.
    `op` "" computes nothing: the gradient of every argument in `gives` is the one tensor in `reads`.
    `flops` and `touched` get the shapes (R as a number) by the names in `reads` and `gives`, `kernel` with "R" in them.
    `kernel_class` is that of the rule if it is empty.
    """

    op: str
    reads: tuple[str | Extent, ...]
    gives: tuple[str, ...]
    flops: Callable[[SimpleNamespace], int] = no_flops
    touched: Callable[[SimpleNamespace], int] | None = None  # elements read and written, if not all there are
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
            unread = {read.of if isinstance(read, Extent) else read for read in gradient.reads} - names
            assert unread <= {gradient_of(name) for name in self.differentiable}, (
                f"{gradient.op} reads {sorted(unread)}"
            )
            assert {*gradient.gives} <= {*self.args}, f"{gradient.op} gives {gradient.gives}"
            assert self.args[len(self.args) - len(self.optional) :] == self.optional, f"not last: {self.optional}"
            assert {*self.differentiable} <= {*self.outputs}, f"no outputs: {self.differentiable}"

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        return tuple(gradient for gradient in (self.dgrad, self.apart, self.wgrad) if gradient)

    @property
    def visible(self) -> int:
        """How many outputs a layer gets, the first ones."""
        return len(self.outputs) - self.hidden

    def value_names(self, op: str, occurrence: int) -> tuple[str, ...]:
        """Logical names of the outputs of the `occurrence`-th `op` of a segment: `linear_2`, `rmsnorm_0_rstd`."""
        call = f"{op}_{occurrence}"
        alone = self.visible == 1
        return tuple(call if alone and index == 0 else f"{call}_{output}" for index, output in enumerate(self.outputs))


def are_places(tensors: tuple[Tensor | None, ...], tokens: int) -> bool:
    """Whether tensors may say of so many tokens where they, or their documents, are; none may."""
    return all(tensor is None or (tensor.shape == (tokens,) and tensor.dtype == "int32") for tensor in tensors)


def statistics_dtype(dtype: str) -> str:
    """Dtype of row statistics and losses of tensors of `dtype`: float32 at least."""
    return "float64" if dtype == "float64" else "float32"
