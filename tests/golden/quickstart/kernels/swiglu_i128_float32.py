"""SwiGLU of rows, y = silu(h₁) · h₂, and its gradients."""
# R rows · I columns a half · h_R2I = [h₁ | h₂]. A program owns ROWS whole rows, so programs share nothing and no
# race is possible. Everything is computed in FP32 and rounded once, when it is stored.

import torch
import triton
import triton.language as tl

I, BLOCK_I = 128, 128
ROWS = 16  # of a tile
LAUNCH = {'num_warps': 4, 'enable_fp_fusion': True}


def swiglu(h_R2I):
    """y_RI."""
    assert h_R2I.is_contiguous() and h_R2I.shape[1] == 2 * I
    num_rows = h_R2I.shape[0]
    y_RI = h_R2I.new_empty(num_rows, I)
    _forward[(triton.cdiv(num_rows, ROWS),)](h_R2I, y_RI, num_rows, I, BLOCK_I, ROWS, **LAUNCH)
    return y_RI


def swiglu_dgrad(dy_RI, h_R2I):
    """dh_R2I."""
    assert dy_RI.is_contiguous() and h_R2I.is_contiguous()
    num_rows = h_R2I.shape[0]
    dh_R2I = torch.empty_like(h_R2I)
    _input_gradient[(triton.cdiv(num_rows, ROWS),)](dy_RI, h_R2I, dh_R2I, num_rows, I, BLOCK_I, ROWS, **LAUNCH)
    return dh_R2I


@triton.jit
def _forward(
    h_R2I,
    y_RI,
    num_rows,
    I: tl.constexpr,
    BLOCK_I: tl.constexpr,
    ROWS: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    for first in tl.range(0, I, BLOCK_I):
        i = first + tl.arange(0, BLOCK_I)
        inside = (r < num_rows)[:, None] & (i < I)[None, :]
        at = h_R2I + r[:, None] * (2 * I) + i[None, :]
        h1 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        h2 = tl.load(at + I, mask=inside, other=0.0).to(tl.float32)
        y = h1 * tl.sigmoid(h1) * h2
        tl.store(y_RI + r[:, None] * I + i[None, :], y.to(y_RI.dtype.element_ty), mask=inside)


@triton.jit
def _input_gradient(
    dy_RI,
    h_R2I,
    dh_R2I,
    num_rows,
    I: tl.constexpr,
    BLOCK_I: tl.constexpr,
    ROWS: tl.constexpr,
):
    """With s = σ(h₁): ∂silu(h₁) = s · (1 + h₁ · (1 − s))."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    for first in tl.range(0, I, BLOCK_I):
        i = first + tl.arange(0, BLOCK_I)
        inside = (r < num_rows)[:, None] & (i < I)[None, :]
        at = r[:, None] * (2 * I) + i[None, :]
        dy = tl.load(dy_RI + r[:, None] * I + i[None, :], mask=inside, other=0.0).to(tl.float32)
        h1 = tl.load(h_R2I + at, mask=inside, other=0.0).to(tl.float32)
        h2 = tl.load(h_R2I + at + I, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(h1)
        dh1 = dy * h2 * s * (1.0 + h1 * (1.0 - s))
        dh2 = dy * h1 * s
        tl.store(dh_R2I + at, dh1.to(dh_R2I.dtype.element_ty), mask=inside)
        tl.store(dh_R2I + at + I, dh2.to(dh_R2I.dtype.element_ty), mask=inside)
