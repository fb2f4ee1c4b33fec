"""Scaling by a constant, the softcap of logits y = cap·tanh(x / cap) (Gemma 2, arXiv 2408.00118), and centering of
rows: a LayerNorm is an RMSNorm of centered rows."""

from __future__ import annotations

from torch import Tensor

from runtime.ops.activation import blocks
from runtime.ops.product import wide


def scale(x_TN: Tensor, factor: float) -> Tensor:
    """x_TN -> y_TN = factor·x."""
    return (x_TN * factor).contiguous()


def scale_dgrad(dy_TN: Tensor, factor: float) -> Tensor:
    """dy_TN -> dx_TN = factor·dy."""
    return (dy_TN * factor).contiguous()


def softcap(x_TN: Tensor, cap: float) -> Tensor:
    """x_TN -> y_TN."""
    y_TN = x_TN.new_empty(x_TN.shape)
    for y_tN, x_tN in blocks(y_TN, x_TN):
        y_tN.copy_((wide(x_tN) / cap).tanh_().mul_(cap))
    return y_TN


def softcap_dgrad(dy_TN: Tensor, y_TN: Tensor, cap: float) -> Tensor:
    """dy_TN, y_TN -> dx_TN = dy·(1 − (y / cap)²)."""
    dx_TN = y_TN.new_empty(y_TN.shape)
    for dx_tN, dy_tN, y_tN in blocks(dx_TN, dy_TN, y_TN):
        dx_tN.copy_((1 - (wide(y_tN) / cap).square_()).mul_(wide(dy_tN)))
    return dx_TN


def center(x_TN: Tensor) -> Tensor:
    """x_TN -> y_TN: each row minus its mean."""
    x = wide(x_TN)
    return (x - x.mean(dim=1, keepdim=True)).to(x_TN.dtype).contiguous()


def center_dgrad(dy_TN: Tensor) -> Tensor:
    """dy_TN -> dx_TN: each row minus its mean."""
    return center(dy_TN)


OPS = (center, center_dgrad, scale, scale_dgrad, softcap, softcap_dgrad)
