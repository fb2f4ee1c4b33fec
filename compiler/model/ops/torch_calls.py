"""Facts about torch ops in the graphs of user modules: which are views, FLOPs, and kernel extents. No torch.

Products have the FLOPs that `torch.utils.flop_counter` counts (a test compares them). Every other op counts as one
operation per element of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from compiler.model.ops.rule import Shape

Shapes = Sequence[Shape]

PREFIX = "aten."
# Ops whose result shares the storage of their first tensor. `_unsafe_view` views a tensor that nothing else uses.
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
    """Whether an op of a graph is a torch op."""
    return op.startswith(PREFIX)


def is_torch_view(op: str) -> bool:
    """Whether a torch op returns a view."""
    return op.rpartition(".")[0] in VIEWS


def _mm(tensors: Shapes) -> Shape:
    (m, k), (_, n) = tensors[-2:]
    return m, n, k


def _bmm(tensors: Shapes) -> Shape:
    (batch, m, k), (_, _, n) = tensors[-2:]
    return batch, m, n, k


# (m, n, k) of the product that an op computes, preceded by the batch size if it is batched.
PRODUCTS: dict[str, Callable[[Shapes], Shape]] = {
    "aten.mm.default": _mm,
    "aten.addmm.default": _mm,
    "aten.bmm.default": _bmm,
    "aten.baddbmm.default": _bmm,
}
CONVOLUTION, CONVOLUTION_BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"


def torch_kernel_class(op: str) -> str:
    """The kernel class of a torch op: that of products, or `add`."""
    if op in PRODUCTS:
        return "grouped_gemm" if PRODUCTS[op] is _bmm else "gemm"
    return "add"


def torch_flops(op: str, reads: Shapes, gives: Shapes) -> int:
    """FLOPs of a call, from the shapes of its tensor arguments and of its results."""
    if op in PRODUCTS:
        return 2 * prod(PRODUCTS[op](reads))
    if op == CONVOLUTION:
        return _convolution_flops(gives[0], reads[1])
    if op == CONVOLUTION_BACKWARD:  # reads d_y, x and the weight: one product each for the gradients of x and w
        return 2 * _convolution_flops(reads[0], reads[2])
    return 0 if is_torch_view(op) else sum(map(prod, gives))


def _convolution_flops(y: Shape, w: Shape) -> int:
    """FLOPs of a convolution: each element of y is a sum over the input channels and kernel positions of w."""
    return 2 * prod(y) * prod(w[1:])


def torch_kernel(op: str, reads: Shapes) -> Shape | None:
    """The extents that the rate of a product depends on, or None for any other op."""
    return PRODUCTS[op](reads) if op in PRODUCTS else None
