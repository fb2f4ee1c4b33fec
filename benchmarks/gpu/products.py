"""Arguments of matrix products at given sizes: plain, FP8, and grouped by expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.gpu.arguments import Arguments
from benchmarks.gpu.sizes import Make, Sizes
from runtime.ops.quantise import quantise, quantise_blocks, quantise_columns


# (rows, outputs, inputs) of a product: the output projection of attention, queries from their latent, and the two
# products of experts.
def out(s: Sizes) -> tuple[int, int, int]:
    return s.tokens, s.hidden, s.heads * s.value


def q_up(s: Sizes) -> tuple[int, int, int]:
    return s.tokens, s.heads * (s.nope + s.rope), s.query_rank


def up(s: Sizes) -> tuple[int, int, int]:
    return s.rows, 2 * s.inner, s.hidden


def down(s: Sizes) -> tuple[int, int, int]:
    return s.rows, s.hidden, s.inner


Shape = Callable[[Sizes], tuple[int, int, int]]


def fp8(shape: Shape) -> Callable[[Sizes, Make], Arguments]:
    def arguments(s: Sizes, t: Make) -> Arguments:
        rows, n, k = shape(s)
        return *quantise(t(rows, k)), *quantise_blocks(t(n, k))[:2]

    return arguments


def fp8_dgrad(shape: Shape) -> Callable[[Sizes, Make], Arguments]:
    def arguments(s: Sizes, t: Make) -> Arguments:
        rows, n, k = shape(s)
        _, scales, turned = quantise_blocks(t(n, k))
        return *quantise(t(rows, n)), turned, scales.t().contiguous()

    return arguments


def fp8_wgrad(shape: Shape) -> Callable[[Sizes, Make], Arguments]:
    def arguments(s: Sizes, t: Make) -> Arguments:
        rows, n, k = shape(s)
        return t.wide(n, k), *quantise_columns(t(rows, n)), *quantise_columns(t(rows, k))

    return arguments


def grouped(shape: Shape) -> Callable[[Sizes, Make], Arguments]:
    def arguments(s: Sizes, t: Make) -> Arguments:
        rows, n, k = shape(s)
        return t(rows, k), t(s.local_experts, n, k), t.offsets(s)

    return arguments


def grouped_dgrad(shape: Shape) -> Callable[[Sizes, Make], Arguments]:
    def arguments(s: Sizes, t: Make) -> Arguments:
        rows, n, k = shape(s)
        return t(rows, n), t(s.local_experts, n, k), t.offsets(s)

    return arguments


def grouped_wgrad(shape: Shape) -> Callable[[Sizes, Make], Arguments]:
    def arguments(s: Sizes, t: Make) -> Arguments:
        rows, n, k = shape(s)
        return t.wide(s.local_experts, n, k), t(rows, n), t(rows, k), t.offsets(s)

    return arguments


def grouped_fp8(shape: Shape) -> Callable[[Sizes, Make], Arguments]:
    def arguments(s: Sizes, t: Make) -> Arguments:
        rows, n, k = shape(s)
        return *quantise(t(rows, k)), *quantise_blocks(t(s.local_experts, n, k))[:2], t.offsets(s)

    return arguments


def grouped_fp8_dgrad(shape: Shape) -> Callable[[Sizes, Make], Arguments]:
    def arguments(s: Sizes, t: Make) -> Arguments:
        rows, n, k = shape(s)
        _, scales, turned = quantise_blocks(t(s.local_experts, n, k))
        return *quantise(t(rows, n)), turned, scales.transpose(1, 2).contiguous(), t.offsets(s)

    return arguments


def grouped_fp8_wgrad(shape: Shape) -> Callable[[Sizes, Make], Arguments]:
    """Experts begin at multiples of 128 rows, as the dispatch to experts pads them."""

    def arguments(s: Sizes, t: Make) -> Arguments:
        s = replace(s, rows=-(-s.rows // 128) * 128)
        rows, n, k = shape(s)
        offsets = t.aligned_offsets(s, 128)
        return t.wide(s.local_experts, n, k), *quantise_columns(t(rows, n)), *quantise_columns(t(rows, k)), offsets

    return arguments
