"""Residual streams of hyper-connections: the products that give the logits of the mixing weights; the weights and the
input of a part of a layer; and the sum of its output into the streams. Shapes: runtime/ops/hyper.py.

The backward computes the weights again: `hyper_mix` saves the logits of a token, n² + 2n numbers, and no round of the
Sinkhorn-Knopp iteration. The products have so few columns that reading the streams dominates: they are timed as norms.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from types import SimpleNamespace

from compiler.model.ops.rule import Extent, Gradient, Rule, Tensor, elementwise, statistics_dtype


def _infer_products(h_TN: Tensor, fn_MN: Tensor, eps: float) -> tuple[Tensor, ...]:
    assert h_TN.shape[1:] == fn_MN.shape[1:], (h_TN, fn_MN)
    T, dtype = h_TN.shape[0], statistics_dtype(h_TN.dtype)
    return Tensor((T, fn_MN.shape[0]), dtype), Tensor((T,), dtype)


def _infer_scaled(logits_TM: Tensor, scale_S: Tensor) -> tuple[Tensor, ...]:
    assert scale_S.shape in ((1,), (3,)), scale_S
    return (logits_TM,)


def _infer_mix(h_TN: Tensor, logits_TM: Tensor, rounds: int, eps: float) -> tuple[Tensor, ...]:
    (T, N), M, dtype = h_TN.shape, logits_TM.shape[1], logits_TM.dtype
    n = isqrt(M + 1) - 1
    assert n * n + 2 * n == M and N % n == 0 and rounds > 0, (h_TN, logits_TM, rounds)
    return Tensor((T, N // n), h_TN.dtype), Tensor((T, n), dtype), Tensor((T, n * n), dtype)


def _infer_collapse(h_TN: Tensor, logits_Tn: Tensor, eps: float) -> tuple[Tensor, ...]:
    (T, N), n = h_TN.shape, logits_Tn.shape[1]
    assert N % n == 0, (h_TN, logits_Tn)
    return (Tensor((T, N // n), h_TN.dtype),)


def _infer_add(h_TN: Tensor, y_TD: Tensor, post_Tn: Tensor, comb_TC: Tensor) -> tuple[Tensor, ...]:
    n = post_Tn.shape[1]
    assert h_TN.shape[1] == n * y_TD.shape[1] and comb_TC.shape[1] == n * n, (h_TN, y_TD, post_Tn, comb_TC)
    return (h_TN,)


def _infer_copy(x_TD: Tensor, streams: int) -> tuple[Tensor, ...]:
    T, D = x_TD.shape
    return (Tensor((T, streams * D), x_TD.dtype),)


def _product_flops(sizes: SimpleNamespace) -> int:
    """Two per element of h and row of fn, and three per element of h for its mean square."""
    (T, N), M = sizes.h, sizes.fn[0]
    return 2 * T * M * N + 3 * T * N


def _mix_flops(times: int) -> Callable[[SimpleNamespace], int]:
    """FLOPs of a sum over streams and of the rounds on each token's matrix: `times` those of the forward."""

    def flops(sizes: SimpleNamespace) -> int:
        (T, N), M = sizes.h, sizes.logits[1]
        return times * T * (2 * N + 4 * M * sizes.rounds)

    return flops


def _stream_product_flops(products: int) -> Callable[[SimpleNamespace], int]:
    """FLOPs of `products` products of each token's streams with a matrix, and as many with a vector."""
    return lambda sizes: products * 2 * sizes.h[0] * sizes.h[1] * (sizes.post[1] + 1)


PRODUCTS = Rule(
    args=("h", "fn", "eps"),
    outputs=("products", "rstd"),
    hidden=1,
    differentiable=("products",),
    infer=_infer_products,
    kernel_class="norm",
    flops=_product_flops,
    dgrad=Gradient(
        "hyper_products_dgrad",
        reads=("d_products", "h", "fn", "products", "rstd"),
        gives=("h",),
        flops=_product_flops,
    ),
    wgrad=Gradient(
        "hyper_products_wgrad",
        reads=("d_products", "h", "rstd"),
        gives=("fn",),
        flops=_product_flops,
    ),
)

SCALE_PARTS = Rule(
    args=("logits", "scale"),
    outputs=("y",),
    infer=_infer_scaled,
    kernel_class="add",
    flops=elementwise("logits", 1),
    dgrad=Gradient("scale_parts_dgrad", reads=("d_y", "scale"), gives=("logits",), flops=elementwise("d_y", 1)),
    wgrad=Gradient(
        "scale_parts_wgrad",
        reads=("d_y", "logits", Extent("scale", 0)),
        gives=("scale",),
        flops=elementwise("logits", 2),
    ),
)

MIX = Rule(
    args=("h", "logits", "rounds", "eps"),
    outputs=("x", "post", "comb"),
    differentiable=("x", "post", "comb"),
    infer=_infer_mix,
    kernel_class="norm",
    flops=_mix_flops(1),
    dgrad=Gradient(
        "hyper_mix_dgrad",
        reads=("d_x", "d_post", "d_comb", "h", "logits", "rounds", "eps"),
        gives=("h", "logits"),
        flops=_mix_flops(3),
    ),
)

COLLAPSE = Rule(
    args=("h", "logits", "eps"),
    outputs=("x",),
    differentiable=("x",),
    infer=_infer_collapse,
    kernel_class="norm",
    flops=elementwise("h", 2),
    dgrad=Gradient(
        "hyper_collapse_dgrad",
        reads=("d_x", "h", "logits", "eps"),
        gives=("h", "logits"),
        flops=elementwise("h", 3),
    ),
)

ADD = Rule(
    args=("h", "y", "post", "comb"),
    outputs=("out",),
    differentiable=("out",),
    infer=_infer_add,
    kernel_class="add",
    flops=_stream_product_flops(1),
    dgrad=Gradient(
        "hyper_add_dgrad",
        reads=("d_out", "h", "y", "post", "comb"),
        gives=("h", "y", "post", "comb"),
        flops=_stream_product_flops(2),
    ),
)

COPY = Rule(
    args=("x", "streams"),
    outputs=("y",),
    infer=_infer_copy,
    kernel_class="copy",
    dgrad=Gradient("hyper_copy_dgrad", reads=("d_y", "streams"), gives=("x",), flops=elementwise("d_y", 1)),
)

RULES = {
    "hyper_products": PRODUCTS,
    "scale_parts": SCALE_PARTS,
    "hyper_mix": MIX,
    "hyper_collapse": COLLAPSE,
    "hyper_add": ADD,
    "hyper_copy": COPY,
}
