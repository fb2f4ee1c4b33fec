"""Matrix products: `linear`; `linear_wide`, whose output is FP32 or wider; `linear_detached`, whose input gets no
gradient; `grouped_linear` over the rows of many experts; `block_linear` over groups of columns, each with a block of
rows of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from compiler.model.ops.rule import Extent, Gradient, Rule, Shape, Tensor, statistics_dtype


def _gemm(rows: str) -> Callable[[SimpleNamespace], int]:
    """FLOPs of a product of all rows of `rows` with weights [.., N, K]."""

    def flops(sizes: SimpleNamespace) -> int:
        *_, N, K = sizes.w
        return 2 * getattr(sizes, rows)[0] * N * K

    return flops


def _product(rows: str, kind: str) -> Callable[[SimpleNamespace], Shape]:
    """(m, n, k) of the product, m rows by n columns, contracted over k; preceded by the number of experts if grouped.

    `kind`: "y" for the output, "x" for the gradient of the input, "w" for that of the weight.
    """

    def extents(sizes: SimpleNamespace) -> Shape:
        *experts, N, K = sizes.w
        T = getattr(sizes, rows)[0]
        return (*experts, *{"y": (T, N, K), "x": (T, K, N), "w": (N, K, T)}[kind])

    return extents


def _infer(x_TK: Tensor, w_NK: Tensor) -> tuple[Tensor, ...]:
    assert x_TK.shape[1] == w_NK.shape[1], (x_TK, w_NK)
    return (Tensor((x_TK.shape[0], w_NK.shape[0]), x_TK.dtype),)


def _infer_wide(x_TK: Tensor, w_NK: Tensor) -> tuple[Tensor, ...]:
    (y_TN,) = _infer(x_TK, w_NK)
    return (Tensor(y_TN.shape, statistics_dtype(y_TN.dtype)),)


def _infer_grouped(x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> tuple[Tensor, ...]:
    assert x_RK.shape[1] == w_ENK.shape[2] and offsets_E.shape == w_ENK.shape[:1], (x_RK, w_ENK, offsets_E)
    return (Tensor((x_RK.shape[0], w_ENK.shape[1]), x_RK.dtype),)


def _infer_blocks(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    (T, columns), (rows, inputs) = x.shape, w.shape
    assert columns % inputs == 0 and rows % (columns // inputs) == 0, (x, w)
    return (Tensor((T, rows), x.dtype),)


def _block_product(rows: str, kind: str) -> Callable[[SimpleNamespace], Shape]:
    """(groups, m, n, k) of one product per group. `kind` as in `_product`."""

    def extents(sizes: SimpleNamespace) -> Shape:
        T, (outputs, K) = getattr(sizes, rows)[0], sizes.w
        groups = sizes.x[1] // K
        N = outputs // groups
        return groups, *{"y": (T, N, K), "x": (T, K, N), "w": (N, K, T)}[kind]

    return extents


LINEAR = Rule(
    args=("x", "w"),
    outputs=("y",),
    infer=_infer,
    kernel_class="gemm",
    flops=_gemm("x"),
    kernel=_product("x", "y"),
    dgrad=Gradient("linear_dgrad", reads=("d_y", "w"), gives=("x",), flops=_gemm("d_y"), kernel=_product("d_y", "x")),
    wgrad=Gradient(
        "linear_wgrad",
        reads=("d_y", "x"),
        gives=("w",),
        flops=_gemm("d_y"),
        kernel=_product("d_y", "w"),
        kernel_class="wgrad",
    ),
)

LINEAR_DETACHED = replace(LINEAR, dgrad=None)

LINEAR_WIDE = Rule(
    args=("x", "w"),
    outputs=("y",),
    infer=_infer_wide,
    kernel_class="gemm",
    flops=_gemm("x"),
    kernel=_product("x", "y"),
    dgrad=Gradient(
        "linear_wide_dgrad", reads=("d_y", "w"), gives=("x",), flops=_gemm("d_y"), kernel=_product("d_y", "x")
    ),
    wgrad=Gradient(
        "linear_wide_wgrad",
        reads=("d_y", "x"),
        gives=("w",),
        flops=_gemm("d_y"),
        kernel=_product("d_y", "w"),
        kernel_class="wgrad",
    ),
)

GROUPED_LINEAR = Rule(
    args=("x", "w", "offsets"),
    outputs=("y",),
    infer=_infer_grouped,
    kernel_class="grouped_gemm",
    flops=_gemm("x"),
    kernel=_product("x", "y"),
    dgrad=Gradient(
        "grouped_linear_dgrad",
        reads=("d_y", "w", "offsets"),
        gives=("x",),
        flops=_gemm("d_y"),
        kernel=_product("d_y", "x"),
    ),
    wgrad=Gradient(
        "grouped_linear_wgrad",
        reads=("d_y", "x", "offsets", Extent("w", 0)),
        gives=("w",),
        flops=_gemm("d_y"),
        kernel=_product("d_y", "w"),
        kernel_class="grouped_wgrad",
    ),
)

BLOCK_LINEAR = Rule(
    args=("x", "w"),
    outputs=("y",),
    infer=_infer_blocks,
    kernel_class="grouped_gemm",
    flops=_gemm("x"),
    kernel=_block_product("x", "y"),
    dgrad=Gradient(
        "block_linear_dgrad",
        reads=("d_y", "w", Extent("x", 1)),
        gives=("x",),
        flops=_gemm("d_y"),
        kernel=_block_product("d_y", "x"),
    ),
    wgrad=Gradient(
        "block_linear_wgrad",
        reads=("d_y", "x", Extent("w", 1)),
        gives=("w",),
        flops=_gemm("d_y"),
        kernel=_block_product("d_y", "w"),
        kernel_class="grouped_wgrad",
    ),
)

RULES = {
    "linear": LINEAR,
    "linear_detached": LINEAR_DETACHED,
    "linear_wide": LINEAR_WIDE,
    "grouped_linear": GROUPED_LINEAR,
    "block_linear": BLOCK_LINEAR,
}
