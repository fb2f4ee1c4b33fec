"""Activations: SwiGLU and others, with gate weights, and with FP8 operands or results. T rows, I columns of y."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import gelu as torch_gelu
from torch.nn.functional import relu, silu

from runtime.ops.native import ops as native
from runtime.ops.native.library import runs_natively
from runtime.ops.product import wide
from runtime.ops.quantise import dequantise, quantise, quantise_both, requantise

# --- SwiGLU: y = silu(g)·u of h = [g | u]. T rows, I columns in each half. Shazeer, "GLU variants", 2020

# Elements per block, so that the next pass finds the results of this one in the cache: 6.5 ms instead of 7.9 without
# blocks (gradients of gated rows, 8192 × 256, FP32, one core).
BLOCK = 2**17
silu_backward = torch.ops.aten.silu_backward.grad_input  # (dy, x, grad_input=dx), written into a view


def swiglu(h_TM: Tensor) -> Tensor:
    """h_TM [T, 2·I] -> y_TI."""
    if runs_natively(h_TM):
        return native.swiglu(h_TM)
    y_TI = h_TM.new_empty((h_TM.shape[0], h_TM.shape[1] // 2))
    for y_tI, h_tM in blocks(y_TI, h_TM):
        g_tI, u_tI = h_tM.chunk(2, dim=-1)
        torch.mul(silu(wide(g_tI)), u_tI, out=y_tI)
    return y_TI


def swiglu_dgrad(dy_TI: Tensor, h_TM: Tensor) -> Tensor:
    """dy_TI, h_TM [T, 2·I] -> dh_TM."""
    if runs_natively(dy_TI, h_TM):
        return native.swiglu_dgrad(dy_TI, h_TM)
    dh_TM = h_TM.new_empty(h_TM.shape)
    for dy_tI, h_tM, dh_tM in blocks(dy_TI, h_TM, dh_TM):
        dy_tI, h_tM, result_tM = wide(dy_tI), wide(h_tM), wide_result(dh_tM)
        g_tI, u_tI = h_tM.chunk(2, dim=-1)
        dg_tI, du_tI = result_tM.chunk(2, dim=-1)
        torch.mul(dy_tI, silu(g_tI), out=du_tI)
        silu_backward(dy_tI * u_tI, g_tI, grad_input=dg_tI)
        if result_tM is not dh_tM:
            dh_tM.copy_(result_tM)
    return dh_TM


def wide_result(x: Tensor) -> Tensor:
    """Return the buffer to compute the result x in: x itself, or for BF16 an FP32 buffer that is rounded into x
    later."""
    return torch.empty_like(x, dtype=torch.float32) if x.dtype == torch.bfloat16 else x


def blocks(*by_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a few rows of each tensor at a time. The width of the first tensor determines how many."""
    rows = max(1, BLOCK // by_row[0].shape[1])
    return zip(*(tensor.split(rows) for tensor in by_row), strict=True)


# --- Other activations: with a gate, y = act(g)·u of h = [g | u]; without one, y = act(h). T rows, I columns of y
#
# GeLU: Hendrycks and Gimpel, arXiv 1606.08415; gated: Shazeer, arXiv 2002.05202. ReLU²: So et al., arXiv 2109.08668.
# GPT-OSS uses the clamped SwiGLU; DeepSeek-V4 uses it with alpha = 1 and shift = 0. Everything is computed in at least
# FP32 and rounded once.

_gelu_backward = torch.ops.aten.gelu_backward


def geglu(h_TM: Tensor) -> Tensor:
    """h_TM [T, 2·I] -> y_TI, using the exact GeLU (erf)."""
    return _geglu(h_TM, "none")


def geglu_dgrad(dy_TI: Tensor, h_TM: Tensor) -> Tensor:
    """dy_TI, h_TM [T, 2·I] -> dh_TM."""
    return _geglu_dgrad(dy_TI, h_TM, "none")


def geglu_tanh(h_TM: Tensor) -> Tensor:
    """h_TM [T, 2·I] -> y_TI, using the tanh approximation of GeLU."""
    return _geglu(h_TM, "tanh")


def geglu_tanh_dgrad(dy_TI: Tensor, h_TM: Tensor) -> Tensor:
    """dy_TI, h_TM [T, 2·I] -> dh_TM."""
    return _geglu_dgrad(dy_TI, h_TM, "tanh")


def gelu(h_TI: Tensor) -> Tensor:
    """h_TI -> y_TI, exact (erf)."""
    return _apply_by_rows(torch_gelu, h_TI)


def gelu_dgrad(dy_TI: Tensor, h_TI: Tensor) -> Tensor:
    """dy_TI, h_TI -> dh_TI."""
    return _apply_by_rows(_gelu_backward, dy_TI, h_TI)


def gelu_tanh(h_TI: Tensor) -> Tensor:
    """h_TI -> y_TI, tanh approximation."""
    return _apply_by_rows(lambda h_tI: torch_gelu(h_tI, approximate="tanh"), h_TI)


def gelu_tanh_dgrad(dy_TI: Tensor, h_TI: Tensor) -> Tensor:
    """dy_TI, h_TI -> dh_TI."""
    return _apply_by_rows(lambda dy_tI, h_tI: _gelu_backward(dy_tI, h_tI, approximate="tanh"), dy_TI, h_TI)


def relu2(h_TI: Tensor) -> Tensor:
    """h_TI -> y_TI = max(h, 0)²."""
    return _apply_by_rows(lambda h_tI: relu(h_tI).square(), h_TI)


def relu2_dgrad(dy_TI: Tensor, h_TI: Tensor) -> Tensor:
    """dy_TI, h_TI -> dh_TI."""
    return _apply_by_rows(lambda dy_tI, h_tI: relu(h_tI).mul_(2).mul_(dy_tI), dy_TI, h_TI)


def clamped_swiglu(h_TM: Tensor, limit: float, alpha: float, shift: float) -> Tensor:
    """h_TM [T, 2·I] -> y_TI = g·sigmoid(alpha·g)·(u + shift), with g clamped to ≤ limit and u to ±limit."""
    y_TI = h_TM.new_empty((h_TM.shape[0], h_TM.shape[1] // 2))
    for y_tI, h_tM in blocks(y_TI, h_TM):
        g_tI, u_tI = wide(h_tM).chunk(2, dim=-1)
        g_tI = g_tI.clamp(max=limit)
        y_tI.copy_(torch.sigmoid(alpha * g_tI).mul_(g_tI).mul_(u_tI.clamp(-limit, limit).add_(shift)))
    return y_TI


def clamped_swiglu_dgrad(dy_TI: Tensor, h_TM: Tensor, limit: float, alpha: float, shift: float) -> Tensor:
    """dy_TI, h_TM [T, 2·I] -> dh_TM: 0 where an element is clamped."""
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
    """x_RI, gate_R -> y_RI: every row times its gate weight. Gate weights are at least FP32."""
    return (wide(x_RI) * gate_R[:, None]).to(x_RI.dtype)


def gate_rows_dgrad(dy_RI: Tensor, x_RI: Tensor, gate_R: Tensor) -> tuple[Tensor, Tensor]:
    """dy_RI, x_RI, gate_R -> dx_RI, dgate_R."""
    dy_RI = wide(dy_RI)
    dx_RI, dgate_R = dy_RI * gate_R[:, None], torch.linalg.vecdot(dy_RI, wide(x_RI))
    return dx_RI.to(x_RI.dtype), dgate_R.to(gate_R.dtype)


def gate_columns(x_TN: Tensor, z_TN: Tensor, silu: bool) -> Tensor:
    """x_TN, z_TN -> y_TN = x·silu(z), or x·sigmoid(z): an elementwise gate on the output of attention."""
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


def _geglu(h_TM: Tensor, approximate: str) -> Tensor:
    y_TI = h_TM.new_empty((h_TM.shape[0], h_TM.shape[1] // 2))
    for y_tI, h_tM in blocks(y_TI, h_TM):
        g_tI, u_tI = wide(h_tM).chunk(2, dim=-1)
        y_tI.copy_(torch_gelu(g_tI, approximate=approximate).mul_(u_tI))
    return y_TI


def _geglu_dgrad(dy_TI: Tensor, h_TM: Tensor, approximate: str) -> Tensor:
    dh_TM = h_TM.new_empty(h_TM.shape)
    for dy_tI, h_tM, dh_tM in blocks(dy_TI, h_TM, dh_TM):
        dy_tI = wide(dy_tI)
        g_tI, u_tI = wide(h_tM).chunk(2, dim=-1)
        dg_tI, du_tI = dh_tM.chunk(2, dim=-1)
        dg_tI.copy_(_gelu_backward(dy_tI * u_tI, g_tI, approximate=approximate))
        du_tI.copy_(torch_gelu(g_tI, approximate=approximate).mul_(dy_tI))
    return dh_TM


def _apply_by_rows(function: Callable[..., Tensor], *by_row: Tensor) -> Tensor:
    """Apply an elementwise function to a few rows at a time, so that the FP32 intermediates stay small."""
    y_TI = by_row[-1].new_empty(by_row[-1].shape)
    for *rows, y_tI in blocks(*by_row, y_TI):
        y_tI.copy_(function(*map(wide, rows)))
    return y_TI


# --- SwiGLU of expert rows, each times its gate weight: y = silu(g)·u·gate of h = [g | u]. R rows, I columns per half
#
# The gate weight is applied here, before the down projection, so that its gradient does not need the expert's output.
# Gate weights and their gradients are at least FP32.


def gated_swiglu(h_RM: Tensor, gate_R: Tensor) -> Tensor:
    """h_RM [R, 2·I], gate_R -> y_RI."""
    if runs_natively(h_RM) and gate_R.dtype == torch.float32:
        return native.swiglu(h_RM, gate_R)
    y_RI = h_RM.new_empty((h_RM.shape[0], h_RM.shape[1] // 2))
    for y_rI, h_rM, gate_r in blocks(y_RI, h_RM, gate_R):
        g_rI, u_rI = h_rM.chunk(2, dim=-1)
        torch.mul(silu(wide(g_rI)).mul_(u_rI), gate_r[:, None], out=y_rI)
    return y_RI


def gated_swiglu_dgrad(dy_RI: Tensor, h_RM: Tensor, gate_R: Tensor) -> tuple[Tensor, Tensor]:
    """dy_RI, h_RM [R, 2·I], gate_R -> dh_RM, dgate_R."""
    if runs_natively(dy_RI, h_RM) and gate_R.dtype == torch.float32:
        return native.gated_swiglu_dgrad(dy_RI, h_RM, gate_R)
    dh_RM, dgate_R = h_RM.new_empty(h_RM.shape), gate_R.new_empty(gate_R.shape)
    for dy_rI, h_rM, gate_r, dh_rM, dgate_r in blocks(dy_RI, h_RM, gate_R, dh_RM, dgate_R):
        result_rM = wide_result(dh_rM)
        _dgrad_into(wide(dy_rI), wide(h_rM), gate_r, result_rM, dgate_r)
        if result_rM is not dh_rM:
            dh_rM.copy_(result_rM)
    return dh_RM, dgate_R


def _dgrad_into(dy_rI: Tensor, h_rM: Tensor, gate_r: Tensor, dh_rM: Tensor, dgate_r: Tensor) -> None:
    """Write the gradients of a block of rows into `dh_rM` and `dgate_r`."""
    g_rI, u_rI = h_rM.chunk(2, dim=-1)
    dg_rI, du_rI = dh_rM.chunk(2, dim=-1)
    buffer_rI = silu(g_rI).mul_(dy_rI)
    torch.linalg.vecdot(buffer_rI, u_rI, out=dgate_r)
    torch.mul(buffer_rI, gate_r[:, None], out=du_rI)
    torch.mul(dy_rI, u_rI, out=buffer_rI)
    silu_backward(buffer_rI.mul_(gate_r[:, None]), g_rI, grad_input=dg_rI)


# --- SwiGLU of an input stored in E4M3, in row tiles: h ≈ data · scale, widened to FP32 as it is read
#
# R rows, I columns per half, M = 2·I, B tiles of 128 columns of h. Results are BF16; gate weights and their gradients
# are FP32.


def swiglu_fp8(h_RM: Tensor, s_RB: Tensor) -> Tensor:
    """h_RM, s_RB -> y_RI."""
    return swiglu(dequantise(h_RM, s_RB)).to(torch.bfloat16)


def gated_swiglu_fp8(h_RM: Tensor, s_RB: Tensor, gate_R: Tensor) -> Tensor:
    """h_RM, s_RB, gate_R -> y_RI."""
    return gated_swiglu(dequantise(h_RM, s_RB), gate_R).to(torch.bfloat16)


def swiglu_fp8_dgrad(dy_RI: Tensor, h_RM: Tensor, s_RB: Tensor) -> Tensor:
    """dy_RI, h_RM, s_RB -> dh_RM."""
    return swiglu_dgrad(dy_RI.to(torch.float32), dequantise(h_RM, s_RB)).to(torch.bfloat16)


def gated_swiglu_fp8_dgrad(dy_RI: Tensor, h_RM: Tensor, s_RB: Tensor, gate_R: Tensor) -> tuple[Tensor, Tensor]:
    """dy_RI, h_RM, s_RB, gate_R -> dh_RM, dgate_R."""
    dh_RM, dgate_R = gated_swiglu_dgrad(dy_RI.to(torch.float32), dequantise(h_RM, s_RB), gate_R)
    return dh_RM.to(torch.bfloat16), dgate_R


def swiglu_fp8_quantise_requantise(h_RM: Tensor, s_RB: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """h_RM, s_RB -> y by columns q_IR, scales: what the forward quantised by rows, recomputed for a weight gradient."""
    return requantise(*quantise(swiglu_fp8(h_RM, s_RB), pow2), pow2)


def gated_swiglu_fp8_quantise_requantise(
    h_RM: Tensor, s_RB: Tensor, gate_R: Tensor, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """h_RM, s_RB, gate_R -> y times the gate weights, by columns q_IR, scales."""
    return requantise(*quantise(gated_swiglu_fp8(h_RM, s_RB, gate_R), pow2), pow2)


# --- SwiGLU fused with quantisation of its result, and its gradient fused with quantisation by rows and by columns
#
# R rows, I columns per half, M = 2·I. Each equals the separate ops in sequence: the result is rounded to the dtype it
# would be stored in, then quantised. `_kept` ops also quantise their input, for a backward that recomputes them; `_fp8`
# ops read such a quantised input (`swiglu_fp8`).

Quantised = tuple[Tensor, Tensor]
Both = tuple[Tensor, Tensor, Tensor, Tensor]


def swiglu_quantise(h_RM: Tensor, pow2: bool = False) -> Quantised:
    """h_RM -> q_RI, scales."""
    return quantise(swiglu(h_RM), pow2)


def gated_swiglu_quantise(h_RM: Tensor, gate_R: Tensor, pow2: bool = False) -> Quantised:
    """h_RM, gate_R -> q_RI, scales."""
    return quantise(gated_swiglu(h_RM, gate_R), pow2)


def swiglu_quantise_kept(h_RM: Tensor, pow2: bool = False) -> Both:
    """h_RM -> y as q_RI, scales; h as q_RM, scales."""
    return *swiglu_quantise(h_RM, pow2), *quantise(h_RM, pow2)


def gated_swiglu_quantise_kept(h_RM: Tensor, gate_R: Tensor, pow2: bool = False) -> Both:
    """h_RM, gate_R -> y as q_RI, scales; h as q_RM, scales."""
    return *gated_swiglu_quantise(h_RM, gate_R, pow2), *quantise(h_RM, pow2)


def swiglu_dgrad_quantise_both(dy_RI: Tensor, h_RM: Tensor, pow2: bool = False) -> Both:
    """dy_RI, h_RM -> dh by rows q_RM, scales, by columns q_MR, scales."""
    return quantise_both(swiglu_dgrad(dy_RI, h_RM), pow2)


def swiglu_fp8_dgrad_quantise_both(dy_RI: Tensor, h_RM: Tensor, s_RB: Tensor, pow2: bool = False) -> Both:
    """dy_RI, h_RM in E4M3, s_RB -> dh by rows q_RM, scales, by columns q_MR, scales."""
    return quantise_both(swiglu_fp8_dgrad(dy_RI, h_RM, s_RB), pow2)


def gated_swiglu_dgrad_quantise_both(
    dy_RI: Tensor, h_RM: Tensor, gate_R: Tensor, pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dy_RI, h_RM, gate_R -> dh by rows q_RM, scales, by columns q_MR, scales; dgate_R."""
    dh_RM, dgate_R = gated_swiglu_dgrad(dy_RI, h_RM, gate_R)
    return *quantise_both(dh_RM, pow2), dgate_R


def gated_swiglu_fp8_dgrad_quantise_both(
    dy_RI: Tensor, h_RM: Tensor, s_RB: Tensor, gate_R: Tensor, pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dy_RI, h_RM in E4M3, s_RB, gate_R -> dh by rows q_RM, scales, by columns q_MR, scales; dgate_R."""
    dh_RM, dgate_R = gated_swiglu_fp8_dgrad(dy_RI, h_RM, s_RB, gate_R)
    return *quantise_both(dh_RM, pow2), dgate_R


OPS = (
    swiglu,
    swiglu_dgrad,
    *(geglu, geglu_dgrad, geglu_tanh, geglu_tanh_dgrad, gelu, gelu_dgrad, gelu_tanh, gelu_tanh_dgrad),
    *(relu2, relu2_dgrad, clamped_swiglu, clamped_swiglu_dgrad, gate_rows, gate_rows_dgrad),
    *(gate_columns, gate_columns_dgrad),
    gated_swiglu,
    gated_swiglu_dgrad,
    swiglu_fp8,
    gated_swiglu_fp8,
    swiglu_fp8_dgrad,
    gated_swiglu_fp8_dgrad,
    swiglu_fp8_quantise_requantise,
    gated_swiglu_fp8_quantise_requantise,
    swiglu_quantise,
    gated_swiglu_quantise,
    swiglu_quantise_kept,
    gated_swiglu_quantise_kept,
    swiglu_dgrad_quantise_both,
    swiglu_fp8_dgrad_quantise_both,
    gated_swiglu_dgrad_quantise_both,
    gated_swiglu_fp8_dgrad_quantise_both,
)
