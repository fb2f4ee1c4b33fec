"""Activations beside SwiGLU: with a gate, y = act(g)·u of h = [g | u]; without one, y = act(h). T rows, I columns of y.

GeLU: Hendrycks and Gimpel, arXiv 1606.08415; of gates: Shazeer, arXiv 2002.05202. ReLU²: So et al., arXiv 2109.08668.
The clamped SwiGLU is that of GPT-OSS, and with alpha = 1 and shift = 0 that of DeepSeek-V4. Everything is computed in
FP32 at least and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu as torch_gelu
from torch.nn.functional import relu

from runtime.ops.swiglu import blocks
from runtime.ops.wide import wide

_gelu_backward = torch.ops.aten.gelu_backward


def geglu(h_TM: Tensor) -> Tensor:
    """h_TM [T, 2·I] -> y_TI, with the GeLU by erf."""
    return _gated(h_TM, "none")


def geglu_dgrad(dy_TI: Tensor, h_TM: Tensor) -> Tensor:
    """dy_TI, h_TM [T, 2·I] -> dh_TM."""
    return _gated_dgrad(dy_TI, h_TM, "none")


def geglu_tanh(h_TM: Tensor) -> Tensor:
    """h_TM [T, 2·I] -> y_TI, with the GeLU by tanh."""
    return _gated(h_TM, "tanh")


def geglu_tanh_dgrad(dy_TI: Tensor, h_TM: Tensor) -> Tensor:
    """dy_TI, h_TM [T, 2·I] -> dh_TM."""
    return _gated_dgrad(dy_TI, h_TM, "tanh")


def gelu(h_TI: Tensor) -> Tensor:
    """h_TI -> y_TI, by erf."""
    return _by_rows(torch_gelu, h_TI)


def gelu_dgrad(dy_TI: Tensor, h_TI: Tensor) -> Tensor:
    """dy_TI, h_TI -> dh_TI."""
    return _by_rows(_gelu_backward, dy_TI, h_TI)


def gelu_tanh(h_TI: Tensor) -> Tensor:
    """h_TI -> y_TI, by tanh."""
    return _by_rows(lambda h_tI: torch_gelu(h_tI, approximate="tanh"), h_TI)


def gelu_tanh_dgrad(dy_TI: Tensor, h_TI: Tensor) -> Tensor:
    """dy_TI, h_TI -> dh_TI."""
    return _by_rows(lambda dy_tI, h_tI: _gelu_backward(dy_tI, h_tI, approximate="tanh"), dy_TI, h_TI)


def relu2(h_TI: Tensor) -> Tensor:
    """h_TI -> y_TI = max(h, 0)²."""
    return _by_rows(lambda h_tI: relu(h_tI).square(), h_TI)


def relu2_dgrad(dy_TI: Tensor, h_TI: Tensor) -> Tensor:
    """dy_TI, h_TI -> dh_TI."""
    return _by_rows(lambda dy_tI, h_tI: relu(h_tI).mul_(2).mul_(dy_tI), dy_TI, h_TI)


def clamped_swiglu(h_TM: Tensor, limit: float, alpha: float, shift: float) -> Tensor:
    """h_TM [T, 2·I] -> y_TI = g·sigmoid(alpha·g)·(u + shift), with g cut off at limit and u at ±limit."""
    y_TI = h_TM.new_empty((h_TM.shape[0], h_TM.shape[1] // 2))
    for y_tI, h_tM in blocks(y_TI, h_TM):
        g_tI, u_tI = wide(h_tM).chunk(2, dim=-1)
        g_tI = g_tI.clamp(max=limit)
        y_tI.copy_(torch.sigmoid(alpha * g_tI).mul_(g_tI).mul_(u_tI.clamp(-limit, limit).add_(shift)))
    return y_TI


def clamped_swiglu_dgrad(dy_TI: Tensor, h_TM: Tensor, limit: float, alpha: float, shift: float) -> Tensor:
    """dy_TI, h_TM [T, 2·I] -> dh_TM: 0 where an element is cut off."""
    dh_TM = h_TM.new_empty(h_TM.shape)
    for dy_tI, h_tM, dh_tM in blocks(dy_TI, h_TM, dh_TM):
        dy_tI = wide(dy_tI)
        g_tI, u_tI = wide(h_tM).chunk(2, dim=-1)
        cut_tI, shifted_tI = g_tI.clamp(max=limit), u_tI.clamp(-limit, limit).add_(shift)
        share_tI = torch.sigmoid(alpha * cut_tI)
        slope_tI = share_tI * (1 + alpha * cut_tI * (1 - share_tI))
        dg_tI, du_tI = dh_tM.chunk(2, dim=-1)
        dg_tI.copy_((dy_tI * shifted_tI * slope_tI).masked_fill_(g_tI > limit, 0))
        du_tI.copy_((dy_tI * cut_tI * share_tI).masked_fill_(u_tI.abs() > limit, 0))
    return dh_TM


def gate_rows(x_RI: Tensor, gate_R: Tensor) -> Tensor:
    """x_RI, gate_R -> y_RI: every row times its gate weight, which is FP32 at least."""
    return (wide(x_RI) * gate_R[:, None]).to(x_RI.dtype)


def gate_rows_dgrad(dy_RI: Tensor, x_RI: Tensor, gate_R: Tensor) -> tuple[Tensor, Tensor]:
    """dy_RI, x_RI, gate_R -> dx_RI, dgate_R."""
    dy_RI = wide(dy_RI)
    dx_RI, dgate_R = dy_RI * gate_R[:, None], torch.linalg.vecdot(dy_RI, wide(x_RI))
    return dx_RI.to(x_RI.dtype), dgate_R.to(gate_R.dtype)


def gate_columns(x_TN: Tensor, z_TN: Tensor, silu: bool) -> Tensor:
    """x_TN, z_TN -> y_TN = x·silu(z), or x·sigmoid(z): what attention gives, behind a gate of each number."""
    z_TN = wide(z_TN)
    gate_TN = torch.nn.functional.silu(z_TN) if silu else torch.sigmoid(z_TN)
    return gate_TN.mul_(wide(x_TN)).to(x_TN.dtype).contiguous()


def gate_columns_dgrad(dy_TN: Tensor, x_TN: Tensor, z_TN: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """dy_TN, x_TN, z_TN -> dx_TN, dz_TN."""
    wide_TN, dy_TN = wide(z_TN), wide(dy_TN)
    share_TN = torch.sigmoid(wide_TN)
    gate_TN = wide_TN * share_TN if silu else share_TN
    slope_TN = (1 - share_TN) * gate_TN + share_TN if silu else (1 - share_TN) * share_TN
    dz_TN = slope_TN.mul_(wide(x_TN)).mul_(dy_TN)
    return (gate_TN * dy_TN).to(x_TN.dtype).contiguous(), dz_TN.to(z_TN.dtype).contiguous()


def _gated(h_TM: Tensor, approximate: str) -> Tensor:
    y_TI = h_TM.new_empty((h_TM.shape[0], h_TM.shape[1] // 2))
    for y_tI, h_tM in blocks(y_TI, h_TM):
        g_tI, u_tI = wide(h_tM).chunk(2, dim=-1)
        y_tI.copy_(torch_gelu(g_tI, approximate=approximate).mul_(u_tI))
    return y_TI


def _gated_dgrad(dy_TI: Tensor, h_TM: Tensor, approximate: str) -> Tensor:
    dh_TM = h_TM.new_empty(h_TM.shape)
    for dy_tI, h_tM, dh_tM in blocks(dy_TI, h_TM, dh_TM):
        dy_tI = wide(dy_tI)
        g_tI, u_tI = wide(h_tM).chunk(2, dim=-1)
        dg_tI, du_tI = dh_tM.chunk(2, dim=-1)
        dg_tI.copy_(_gelu_backward(dy_tI * u_tI, g_tI, approximate=approximate))
        du_tI.copy_(torch_gelu(g_tI, approximate=approximate).mul_(dy_tI))
    return dh_TM


def _by_rows(function: Callable[..., Tensor], *by_row: Tensor) -> Tensor:
    """The result of an elementwise function, some rows at a time: what is wider than BF16 is small."""
    y_TI = by_row[-1].new_empty(by_row[-1].shape)
    for *rows, y_tI in blocks(*by_row, y_TI):
        y_tI.copy_(function(*map(wide, rows)))
    return y_TI


OPS = (
    *(geglu, geglu_dgrad, geglu_tanh, geglu_tanh_dgrad, gelu, gelu_dgrad, gelu_tanh, gelu_tanh_dgrad),
    *(relu2, relu2_dgrad, clamped_swiglu, clamped_swiglu_dgrad, gate_rows, gate_rows_dgrad),
    *(gate_columns, gate_columns_dgrad),
)
