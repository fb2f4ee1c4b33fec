"""Facts of torch's own ops in graphs of modules: which are views, FLOPs, and what rates depend on. No torch.

Products have the FLOPs that torch's own counter has for them (`torch.utils.flop_counter`; a test compares). Every
other op does one operation for each element of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from compiler.model.ops.rule import Shape

Shapes = Sequence[Shape]

PREFIX = "aten."
# Ops whose result lies in the storage of their first tensor. `_unsafe_view` is the view of what nobody else has.
VIEWS = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *(
            "_unsafe_view",
            "as_strided",
            "diagonal",
            "expand",
            "permute",
            "select",
            "slice",
            "squeeze",
            "t",
            "transpose",
        ),
        *("unfold", "unsqueeze", "view"),
    )
)


def is_torch_call(op: str) -> bool:
    """Whether an op of a graph is one of torch's."""
    return op.startswith(PREFIX)


def is_torch_view(op: str) -> bool:
    """Whether the result of an op of torch is a view."""
    return op.rpartition(".")[0] in VIEWS


def _mm(tensors: Shapes) -> Shape:
    (m, k), (_, n) = tensors[-2:]
    return m, n, k


def _bmm(tensors: Shapes) -> Shape:
    (batch, m, k), (_, _, n) = tensors[-2:]
    return batch, m, n, k


# By the name of an op: (m, n, k) of a product, behind their number where there are several.
PRODUCTS: dict[str, Callable[[Shapes], Shape]] = {
    "aten.mm.default": _mm,
    "aten.addmm.default": _mm,
    "aten.bmm.default": _bmm,
    "aten.baddbmm.default": _bmm,
}
CONVOLUTION, CONVOLUTION_BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"


def torch_kernel_class(op: str) -> str:
    """The kernel class of an op of torch: of products, and of what moves data."""
    if op in PRODUCTS:
        return "grouped_gemm" if PRODUCTS[op] is _bmm else "gemm"
    return "add"


def torch_flops(op: str, reads: Shapes, gives: Shapes) -> int:
    """FLOPs of a call, by the shapes of its tensors and of its results."""
    if op in PRODUCTS:
        return 2 * prod(PRODUCTS[op](reads))
    if op == CONVOLUTION:
        return _convolved(gives[0], reads[1])
    if op == CONVOLUTION_BACKWARD:  # of d_y, x and the weight: a product like the forward's for each of their gradients
        return 2 * _convolved(reads[0], reads[2])
    return 0 if is_torch_view(op) else sum(map(prod, gives))


def _convolved(y: Shape, w: Shape) -> int:
    """FLOPs of a convolution: each element of y is a sum over the channels and places of w, without the output's."""
    return 2 * prod(y) * prod(w[1:])


def torch_kernel(op: str, reads: Shapes) -> Shape | None:
    """The extents that the rate of a product depends on; None of any other op."""
    return PRODUCTS[op](reads) if op in PRODUCTS else None
