"""SwiGLU whose result is quantised in the same pass, and its gradient, which is quantised by rows and by columns.

R rows, I columns a half, M = 2·I. Each is the ops one after the other: a result is rounded to the dtype it would be
stored in, and then quantised. `_kept` ops quantise their input as well, for a backward that computes them again; `_fp8`
ops read an input that was so kept (`swiglu_fp8`).
"""

from __future__ import annotations

from torch import Tensor

from runtime.ops.gated_swiglu import gated_swiglu, gated_swiglu_dgrad
from runtime.ops.quantise import quantise, quantise_both
from runtime.ops.swiglu import swiglu, swiglu_dgrad
from runtime.ops.swiglu_fp8 import gated_swiglu_fp8_dgrad, swiglu_fp8_dgrad

Quantised = tuple[Tensor, Tensor]
Both = tuple[Tensor, Tensor, Tensor, Tensor]


def swiglu_quantise(h_RM: Tensor, pow2: bool = False) -> Quantised:
    """h_RM -> q_RI, scales."""
    return quantise(swiglu(h_RM), pow2)


def gated_swiglu_quantise(h_RM: Tensor, gate_R: Tensor, pow2: bool = False) -> Quantised:
    """h_RM, gate_R -> q_RI, scales."""
    return quantise(gated_swiglu(h_RM, gate_R), pow2)


def swiglu_quantise_kept(h_RM: Tensor, pow2: bool = False) -> Both:
    """h_RM -> q_RI, scales, and of h: q_RM, scales."""
    return *swiglu_quantise(h_RM, pow2), *quantise(h_RM, pow2)


def gated_swiglu_quantise_kept(h_RM: Tensor, gate_R: Tensor, pow2: bool = False) -> Both:
    """h_RM, gate_R -> q_RI, scales, and of h: q_RM, scales."""
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
    swiglu_quantise,
    gated_swiglu_quantise,
    swiglu_quantise_kept,
    gated_swiglu_quantise_kept,
    swiglu_dgrad_quantise_both,
    swiglu_fp8_dgrad_quantise_both,
    gated_swiglu_dgrad_quantise_both,
    gated_swiglu_fp8_dgrad_quantise_both,
)
