"""Quantisation to the formats of `formats`, and products of quantised operands: the same ops for each format.

R rows, K inputs, N outputs, E experts. `planes` are the tensors that store a tensor in its format. Names of ops include
the name of the format: `quantise_mxfp8`, `linear_nvfp4_dgrad`. As in `linear_fp8`, a product of two numbers is exact,
sums are FP32, and a result is rounded once, to BF16. Products read both operands along their rows, so weight gradients
and input gradients take transposed operands. Tensor scales multiply the sums.

A gradient, and the input of a weight gradient, are quantised from the unquantised numbers, by rows and by columns. With
`transform`, `hadamard` is applied before quantising by columns, in both operands of the product. Everything is rounded
to nearest, except gradients with a `key`: these are rounded stochastically (`stochastic`), with separate random numbers
for rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.ops.formats import FORMATS, Format, Planes, Tile, pack_planes, unpack_planes
from runtime.ops.grouped_linear import groups
from runtime.ops.hadamard import hadamard
from runtime.ops.product import add_product_, product
from runtime.ops.stochastic import thresholds

Op = Callable[..., Tensor | Planes | None]


def _casts(form: Format) -> tuple[Op, ...]:
    """Return the ops that quantise to a format."""

    def quantise(x_RC: Tensor) -> Planes:
        """x_RC -> planes, by rows."""
        return pack_planes(x_RC, form, form.tile)

    def quantise_columns(x_RC: Tensor, transform: bool = False) -> Planes:
        """x_RC -> planes of x_CR, for a weight gradient."""
        return pack_planes((hadamard(x_RC) if transform else x_RC).t(), form, form.tile)

    def quantise_both(dy_RC: Tensor, transform: bool = False, key: Tensor | None = None) -> Planes:
        """dy_RC -> planes by rows, for an input gradient, and planes of dy_CR, for a weight gradient.

        key: seed, step and tensor (int64 [3]) for stochastic rounding; without it, numbers are rounded to nearest.
        """
        if key is None:
            return *quantise(dy_RC), *quantise_columns(dy_RC, transform)
        summed_RC = hadamard(dy_RC) if transform else dy_RC
        by_rows = pack_planes(dy_RC, form, form.tile, thresholds(dy_RC, key))
        return *by_rows, *pack_planes(summed_RC.t(), form, form.tile, thresholds(dy_RC, key, salt=1).t())

    def quantise_blocks(w_NK: Tensor) -> Planes:
        """w_NK, or w_ENK of experts -> planes, planes of the transposed weight."""
        return *pack_planes(w_NK, form, form.weight_tile), *pack_planes(w_NK.transpose(-1, -2), form, form.weight_tile)

    ops: tuple[Op, ...] = (quantise, quantise_columns, quantise_both, quantise_blocks)
    return tuple(_rename_op(f"{op.__name__}_{form.name}", op) for op in ops)


def _products(form: Format) -> tuple[Op, ...]:
    """Return the products of operands in a format, plain and grouped by expert."""
    count = form.planes

    def linear(*operands: Tensor) -> Tensor:
        """Planes of x_RK, planes of w_NK -> y_RN (BF16)."""
        x, w = operands[:count], operands[count:]
        return _scale_sums(product(_wide(x, form.tile), _wide(w, form.weight_tile).t()), x, w).to(torch.bfloat16)

    def linear_dgrad(*operands: Tensor) -> Tensor:
        """Planes of dy_RN, planes of w_KN (transposed) -> dx_RK (BF16)."""
        return linear(*operands)

    def linear_wgrad_(acc_NK: Tensor, *operands: Tensor) -> None:
        """acc_NK (FP32) += dw_NK of planes of dy_NR, planes of x_KR, both transposed."""
        dy, x = operands[:count], operands[count:]
        _add(acc_NK, _wide(dy, form.tile), _wide(x, form.tile), _factor(dy, x))

    def grouped_linear(*operands: Tensor) -> Tensor:
        """Planes of x_RK, planes of w_ENK, offsets_E (int32) -> y_RN (BF16)."""
        x, w, offsets_E = operands[:count], operands[count:-1], operands[-1]
        x_RK, w_ENK = _wide(x, form.tile), _wide(w, form.weight_tile)
        y_RN = x_RK.new_empty((x_RK.shape[0], w_ENK.shape[1]))
        for expert, start, end in groups(offsets_E, len(w_ENK), len(x_RK)):
            of_expert = tuple(plane[expert] for plane in w)
            y_RN[start:end] = _scale_sums(product(x_RK[start:end], w_ENK[expert].t()), x, of_expert)
        return y_RN.to(torch.bfloat16)

    def grouped_linear_dgrad(*operands: Tensor) -> Tensor:
        """Planes of dy_RN, planes of w_EKN (transposed), offsets_E -> dx_RK (BF16)."""
        return grouped_linear(*operands)

    def grouped_linear_wgrad_(acc_ENK: Tensor, *operands: Tensor) -> None:
        """acc_ENK (FP32) += dw_ENK of planes of dy_NR, planes of x_KR, both transposed, offsets_E."""
        dy, x, offsets_E = operands[:count], operands[count:-1], operands[-1]
        dy_NR, x_KR = _wide(dy, form.tile), _wide(x, form.tile)
        for expert, start, end in groups(offsets_E, len(acc_ENK), int(offsets_E[-1])):
            _add(acc_ENK[expert], dy_NR[:, start:end], x_KR[:, start:end], _factor(dy, x))

    def _wide(planes: Planes, tile: Tile) -> Tensor:
        return unpack_planes(planes, form, tile)

    def _factor(a: Planes, b: Planes) -> Tensor | None:
        return a[-1] * b[-1] if form.scale == "e4m3" else None

    def _scale_sums(sums: Tensor, a: Planes, b: Planes) -> Tensor:
        factor = _factor(a, b)
        return sums if factor is None else sums.mul_(factor)

    ops: tuple[Op, ...] = (linear, linear_dgrad, linear_wgrad_)
    ops += (grouped_linear, grouped_linear_dgrad, grouped_linear_wgrad_)
    return tuple(_rename_op(op.__name__.replace("linear", f"linear_{form.name}"), op) for op in ops)


def _add(acc_NK: Tensor, dy_NR: Tensor, x_KR: Tensor, factor: Tensor | None) -> None:
    """acc += dy·xᵀ, times the tensor scales."""
    if factor is None:
        add_product_(acc_NK, dy_NR, x_KR.t())
    else:
        acc_NK.add_(product(dy_NR, x_KR.t()).mul_(factor))


def _rename_op(name: str, op: Op) -> Op:
    op.__name__ = op.__qualname__ = name
    return op


def _ops() -> tuple[Op, ...]:
    """Return the ops of all formats except E5M6, which only stores values and has no products."""
    return tuple(op for form in FORMATS.values() if form.name != "e5m6" for op in (*_casts(form), *_products(form)))


OPS = _ops()
