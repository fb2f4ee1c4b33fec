"""SwiGLU of an input that was kept in E4M3, in tiles of rows: h ≈ data · scale, widened to FP32 as it is read.

R rows, I columns a half, M = 2·I, B tiles of 128 columns of h. Results are BF16; gate weights and their gradients FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.gated_swiglu import gated_swiglu, gated_swiglu_dgrad
from runtime.ops.quantise import dequantise, quantise, requantise
from runtime.ops.swiglu import swiglu, swiglu_dgrad


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
    """h_RM, s_RB -> y by columns q_IR and scales: what F quantised by rows, made again for a weight gradient."""
    return requantise(*quantise(swiglu_fp8(h_RM, s_RB), pow2), pow2)


def gated_swiglu_fp8_quantise_requantise(
    h_RM: Tensor, s_RB: Tensor, gate_R: Tensor, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """h_RM, s_RB, gate_R -> y times the gate weights by columns q_IR and scales."""
    return requantise(*quantise(gated_swiglu_fp8(h_RM, s_RB, gate_R), pow2), pow2)


OPS = (
    swiglu_fp8,
    gated_swiglu_fp8,
    swiglu_fp8_dgrad,
    gated_swiglu_fp8_dgrad,
    swiglu_fp8_quantise_requantise,
    gated_swiglu_fp8_quantise_requantise,
)
