# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""SwiGLU of rows, y = silu(h₁) · h₂, or times the gate weight of each row, and its gradients."""
# R rows · I columns a half · h_R2I = [h₁ | h₂] · B tiles of 128 columns of h. A program owns ROWS rows, of BLOCK_I
# columns or of all where it sums along them, so programs share nothing, no race is possible, and each byte is moved
# once. Everything is computed in FP32 and rounded once, when it is stored.

import torch
import triton
import triton.language as tl

I, BLOCK_I = 128, 128
ROWS = 16  # of a tile
LAUNCH = {'num_warps': 4, 'enable_fp_fusion': True}


def swiglu(h_R2I):
    """y_RI."""
    return _launch_forward(h_R2I, None, None)


def gated_swiglu(h_R2I, gate_R):
    """y_RI."""
    return _launch_forward(h_R2I, None, gate_R)


def swiglu_dgrad(dy_RI, h_R2I):
    """dh_R2I."""
    return _launch_gradient(dy_RI, h_R2I, None, None)[0]


def gated_swiglu_dgrad(dy_RI, h_R2I, gate_R):
    """(dh_R2I, dgate_R)."""
    return _launch_gradient(dy_RI, h_R2I, None, gate_R)


def _launch_forward(h_R2I, s_RB, gate_R):
    _check(h_R2I, s_RB, gate_R)
    num_rows = h_R2I.shape[0]
    y_RI = h_R2I.new_empty(num_rows, I)
    grid = (triton.cdiv(num_rows, ROWS) * triton.cdiv(I, BLOCK_I),)
    _forward[grid](h_R2I, s_RB, gate_R, y_RI, num_rows, I, BLOCK_I, ROWS, **LAUNCH)
    return y_RI


def _launch_gradient(dy_RI, h_R2I, s_RB, gate_R):
    _check(h_R2I, s_RB, gate_R)
    assert dy_RI.is_contiguous()
    num_rows, span = h_R2I.shape[0], BLOCK_I if gate_R is None else I
    dh_R2I, dgate_R = dy_RI.new_empty(h_R2I.shape), None if gate_R is None else torch.empty_like(gate_R)
    grid = (triton.cdiv(num_rows, ROWS) * triton.cdiv(I, span),)
    _input_gradient[grid](dy_RI, h_R2I, s_RB, gate_R, dh_R2I, dgate_R, num_rows, I, span, BLOCK_I, ROWS, **LAUNCH)
    return dh_R2I, dgate_R


def _check(h_R2I, s_RB, gate_R):
    assert h_R2I.is_contiguous() and h_R2I.shape[1] == 2 * I
    assert (s_RB is None or s_RB.t().is_contiguous()) and (gate_R is None or gate_R.is_contiguous())


@triton.jit
def _read(at, mask):
    """What is read once makes room first, in both caches."""
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _halves(h_R2I, s_RB, r, begin, num_rows, I: tl.constexpr, BLOCK_I: tl.constexpr, ROWS: tl.constexpr):
    """h₁ and h₂ of rows r and BLOCK_I columns."""
    i = begin + tl.arange(0, BLOCK_I)
    inside = (r < num_rows)[:, None] & (i < I)[None, :]
    at = h_R2I + r[:, None] * (2 * I) + i[None, :]
    return _read(at, inside), _read(at + I, inside)


@triton.jit
def _forward(h_R2I, s_RB, gate_R, y_RI, num_rows, I: tl.constexpr, BLOCK_I: tl.constexpr, ROWS: tl.constexpr):
    across: tl.constexpr = (I + BLOCK_I - 1) // BLOCK_I
    r = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(0) % across * BLOCK_I
    i = begin + tl.arange(0, BLOCK_I)
    h1, h2 = _halves(h_R2I, s_RB, r, begin, num_rows, I, BLOCK_I, ROWS)
    y = h1 * tl.sigmoid(h1) * h2
    if gate_R is not None:
        y *= tl.load(gate_R + r, mask=r < num_rows, other=0.0).to(tl.float32)[:, None]
    inside = (r < num_rows)[:, None] & (i < I)[None, :]
    tl.store(y_RI + r[:, None] * I + i[None, :], y.to(y_RI.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def _input_gradient(
    dy_RI, h_R2I, s_RB, gate_R, dh_R2I, dgate_R, num_rows,
    I: tl.constexpr, SPAN: tl.constexpr, BLOCK_I: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """With s = σ(h₁): ∂silu(h₁) = s · (1 + h₁ · (1 − s)). A program has SPAN columns: all, where there are gates."""
    across: tl.constexpr = (I + SPAN - 1) // SPAN
    r = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(0) % across * SPAN
    if gate_R is not None:
        gate = tl.load(gate_R + r, mask=r < num_rows, other=0.0).to(tl.float32)
        dgate = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(begin, begin + SPAN, BLOCK_I):
        i = first + tl.arange(0, BLOCK_I)
        inside = (r < num_rows)[:, None] & (i < I)[None, :]
        dy = _read(dy_RI + r[:, None] * I + i[None, :], inside)
        h1, h2 = _halves(h_R2I, s_RB, r, first, num_rows, I, BLOCK_I, ROWS)
        s = tl.sigmoid(h1)
        dh1, dh2 = dy * h2 * s * (1.0 + h1 * (1.0 - s)), dy * h1 * s
        if gate_R is not None:
            dgate += tl.sum(dh2 * h2, 1)
            dh1, dh2 = dh1 * gate[:, None], dh2 * gate[:, None]
        at = dh_R2I + r[:, None] * (2 * I) + i[None, :]
        tl.store(at, dh1.to(dh_R2I.dtype.element_ty), mask=inside, cache_modifier=".cs")
        tl.store(at + I, dh2.to(dh_R2I.dtype.element_ty), mask=inside, cache_modifier=".cs")
    if gate_R is not None:
        tl.store(dgate_R + r, dgate.to(dgate_R.dtype.element_ty), mask=r < num_rows)
