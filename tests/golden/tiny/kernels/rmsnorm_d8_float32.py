"""RMSNorm of rows: y = x · rstd · w with rstd = 1 / √(mean x² + eps), and its gradients.

T rows · D columns. A program owns ROWS whole rows, so every sum over D stays inside it. The weight gradient sums
over rows in two steps, a partial sum a program and then their total in a fixed order: no atomics, no races, and
equal bits from run to run. Everything is computed in FP32 and rounded once, when it is stored.
"""

import torch
import triton
import triton.language as tl

D, BLOCK_D = 8, 8
ROWS = 256  # of a tile
PROGRAMS = 132  # partial sums of a weight gradient
BLOCK_P = 256
LAUNCH = {'num_warps': 4, 'enable_fp_fusion': True}
TOTAL = {'num_warps': 4, 'enable_fp_fusion': True}


def rmsnorm(x_TD, w_D, eps):
    """(y_TD, rstd_T). Here and below x and dy may be views of some columns of wider tensors."""
    assert x_TD.stride(1) == 1 and x_TD.shape[1] == D
    num_rows = x_TD.shape[0]
    y_TD = x_TD.new_empty(num_rows, D)
    rstd_T = torch.empty(num_rows, dtype=torch.float32, device=x_TD.device)
    grid = (triton.cdiv(num_rows, ROWS),)
    _forward[grid](x_TD, w_D, y_TD, rstd_T, x_TD.stride(0), num_rows, eps, D, BLOCK_D, ROWS, **LAUNCH)
    return y_TD, rstd_T


def rmsnorm_dgrad(dy_TD, x_TD, w_D, rstd_T):
    """dx_TD."""
    assert x_TD.stride(1) == 1 and dy_TD.stride(1) == 1
    num_rows = x_TD.shape[0]
    dx_TD = x_TD.new_empty(num_rows, D)
    grid = (triton.cdiv(num_rows, ROWS),)
    strides = dy_TD.stride(0), x_TD.stride(0)
    _input_gradient[grid](dy_TD, x_TD, w_D, rstd_T, dx_TD, *strides, num_rows, D, BLOCK_D, ROWS, **LAUNCH)
    return dx_TD


def rmsnorm_wgrad_(acc_D, dy_TD, x_TD, rstd_T):
    """acc_D += Σ_t dy · x · rstd."""
    assert x_TD.stride(1) == 1 and dy_TD.stride(1) == 1 and acc_D.is_contiguous()
    partial_PD = torch.empty(PROGRAMS, D, dtype=torch.float32, device=x_TD.device)
    strides = dy_TD.stride(0), x_TD.stride(0)
    _partial_weight_gradient[(PROGRAMS,)](
        dy_TD, x_TD, rstd_T, partial_PD, *strides, x_TD.shape[0], D, BLOCK_D, ROWS, PROGRAMS, **LAUNCH
    )
    _total_weight_gradient[(triton.cdiv(D, 32),)](acc_D, partial_PD, D, PROGRAMS, BLOCK_P, 32, **TOTAL)


@triton.jit
def _forward(
    x_TD, w_D, y_TD, rstd_T, stride_x, num_rows, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (t < num_rows)[:, None] & (d < D)[None, :]
    x = tl.load(x_TD + t[:, None] * stride_x + d[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_D + d, mask=d < D, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    y = x * rstd[:, None] * w[None, :]
    tl.store(y_TD + t[:, None] * D + d[None, :], y.to(y_TD.dtype.element_ty), mask=inside)
    tl.store(rstd_T + t, rstd, mask=t < num_rows)


@triton.jit
def _input_gradient(
    dy_TD, x_TD, w_D, rstd_T, dx_TD, stride_dy, stride_x, num_rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = rstd · (w·dy − x · rstd² · mean(w·dy·x))."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (t < num_rows)[:, None] & (d < D)[None, :]
    dy = tl.load(dy_TD + t[:, None] * stride_dy + d[None, :], mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_TD + t[:, None] * stride_x + d[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_D + d, mask=d < D, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_T + t, mask=t < num_rows, other=0.0)
    dy *= w[None, :]
    along_x = tl.sum(dy * x, 1) * rstd * rstd / D
    dx = rstd[:, None] * (dy - x * along_x[:, None])
    tl.store(dx_TD + t[:, None] * D + d[None, :], dx.to(dx_TD.dtype.element_ty), mask=inside)


@triton.jit
def _partial_weight_gradient(
    dy_TD, x_TD, rstd_T, partial_PD, stride_dy, stride_x, num_rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Program p sums the row tiles p, p + PROGRAMS, …"""
    program = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for first in tl.range(program * ROWS, num_rows, PROGRAMS * ROWS):
        t = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (t < num_rows)[:, None] & (d < D)[None, :]
        dy = tl.load(dy_TD + t[:, None] * stride_dy + d[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_TD + t[:, None] * stride_x + d[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_T + t, mask=t < num_rows, other=0.0)
        total += dy * x * rstd[:, None]
    tl.store(partial_PD + program * D + d, tl.sum(total, 0), mask=d < D)


@triton.jit
def _total_weight_gradient(
    acc_D, partial_PD, D: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr
):
    p = tl.arange(0, BLOCK_P)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (p < PROGRAMS)[:, None] & (d < D)[None, :]
    total = tl.sum(tl.load(partial_PD + p[:, None] * D + d[None, :], mask=inside, other=0.0), 0)
    acc = tl.load(acc_D + d, mask=d < D, other=0.0)
    tl.store(acc_D + d, acc + total.to(acc.dtype), mask=d < D)
