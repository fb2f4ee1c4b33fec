# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""RMSNorm of rows: y = x · rstd · w with rstd = 1 / √(mean x² + eps), and its gradients."""
# T rows of HEADS heads · D columns of a head. Below a row is a head of a row: row r is head r % HEADS of row
# r // HEADS. A program owns ROWS whole rows, so every sum over D stays inside it, and holds them in registers, so each
# byte is moved once. The weight gradient sums over rows in two steps, a partial sum a program and then their total in a
# fixed order: no atomics, no races, and equal bits from run to run. Everything is computed in FP32 and rounded once,
# when it is stored; what is stored and read on in the same pass is read as it was rounded.

import torch
import triton
import triton.language as tl

D, HEADS = 64, 1
FORWARD = {'ROWS': 32, 'BLOCK_D': 64, 'num_warps': 4, 'enable_fp_fusion': True}
DGRAD = {'ROWS': 32, 'BLOCK_D': 64, 'num_warps': 4, 'enable_fp_fusion': True}
WGRAD = {'ROWS': 64, 'BLOCK_D': 64, 'num_warps': 8, 'enable_fp_fusion': True}
SPLITS = 528  # partial sums of a weight gradient
TOTAL = {'BLOCK_P': 128, 'BLOCK_D': 32, 'num_warps': 4, 'enable_fp_fusion': True}


def rmsnorm(x_TD, w_D, eps):
    """(y_TD, rstd_T). Here and below x and dy may be views of some columns of wider tensors."""
    y_TD, rstd_T = x_TD.new_empty(x_TD.shape), _statistics(x_TD)
    _launch_forward(None, x_TD, None, w_D, y_TD, rstd_T, eps)
    return y_TD, rstd_T


def add_rmsnorm(h_TD, x_TD, w_D, eps):
    """(sum_TD = h + x, rounded; y_TD, rstd_T of the sum)."""
    sum_TD, y_TD, rstd_T = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape), _statistics(x_TD)
    _launch_forward(h_TD, x_TD, sum_TD, w_D, y_TD, rstd_T, eps)
    return sum_TD, y_TD, rstd_T


def rmsnorm_dgrad(dy_TD, x_TD, w_D, rstd_T):
    """dx_TD."""
    return _launch_dgrad(dy_TD, x_TD, w_D, rstd_T, None)


def rmsnorm_dgrad_add(dy_TD, x_TD, w_D, rstd_T, add_TD):
    """dx_TD, rounded, + add_TD."""
    return _launch_dgrad(dy_TD, x_TD, w_D, rstd_T, add_TD)


def rmsnorm_wgrad_(acc_D, dy_TD, x_TD, rstd_T):
    """acc_D += Σ_t dy · x · rstd."""
    _launch_wgrad(acc_D, dy_TD, x_TD, rstd_T)


def _statistics(x_TD):
    assert x_TD.shape[1] == D
    return torch.empty(x_TD.shape[0], dtype=torch.float32, device=x_TD.device)


def _launch_forward(h, x, total, w_D, y, rstd, eps):
    stride_h = 0 if h is None else _stride(h)
    num_rows = x.shape[0] * HEADS
    grid = (triton.cdiv(num_rows, FORWARD["ROWS"]),)
    _forward[grid](h, x, total, w_D, y, rstd, stride_h, _stride(x), num_rows, eps, D, HEADS, **FORWARD)


def _launch_dgrad(dy, x, w_D, rstd, add):
    dx, num_rows = x.new_empty(x.shape), x.shape[0] * HEADS
    strides = _stride(dy), _stride(x), 0 if add is None else _stride(add)
    grid = (triton.cdiv(num_rows, DGRAD["ROWS"]),)
    _input_gradient[grid](dy, x, w_D, rstd, add, dx, *strides, num_rows, D, HEADS, **DGRAD)
    return dx


def _launch_wgrad(acc_D, dy, x, rstd):
    assert acc_D.is_contiguous()
    partial_PD = torch.empty(SPLITS, D, dtype=torch.float32, device=x.device)
    num_rows, blocks = x.shape[0] * HEADS, triton.cdiv(D, WGRAD["BLOCK_D"])
    _partial_weight_gradient[(SPLITS * blocks,)](
        dy, x, rstd, partial_PD, _stride(dy), _stride(x), num_rows, D, HEADS, SPLITS, **WGRAD
    )
    _total_weight_gradient[(triton.cdiv(D, TOTAL["BLOCK_D"]),)](acc_D, partial_PD, D, SPLITS, **TOTAL)


def _stride(x):
    """From row to row of a view of columns."""
    assert x.stride(1) == 1
    return x.stride(0)


@triton.jit
def _read(at, mask):
    """What is read once makes room first, in both caches: the weight, read by every program, stays."""
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _normed(values, w, eps, D: tl.constexpr):
    """(rows times rstd times w; rstd)."""
    rstd = tl.rsqrt(tl.sum(values * values, 1) / D + eps)
    return values * rstd[:, None] * w[None, :], rstd
@triton.jit
def _past(slope, values, w, rstd, D: tl.constexpr):
    """dx = rstd · (w·dy − x · rstd² · mean(w·dy·x)), of dy in `slope` and x in `values`."""
    slope *= w[None, :]
    along_x = tl.sum(slope * values, 1) * rstd * rstd / D
    return rstd[:, None] * (slope - values * along_x[:, None])
@triton.jit
def _begin(r, stride, D: tl.constexpr, HEADS: tl.constexpr):
    """Where row r begins."""
    if HEADS == 1:
        return r * stride
    else:
        return r // HEADS * stride + r % HEADS * D


@triton.jit
def _forward(
    h, x, total, w_D, y, rstd_R, stride_h, stride_x, num_rows, eps,
    D: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The rows are x, or h + x, which is stored as `total`."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (r < num_rows)[:, None] & (d < D)[None, :]
    values = _read(x + _begin(r, stride_x, D, HEADS)[:, None] + d[None, :], inside)
    w = tl.load(w_D + d, mask=d < D, other=0.0).to(tl.float32)
    if h is not None:
        values += _read(h + _begin(r, stride_h, D, HEADS)[:, None] + d[None, :], inside)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + r[:, None] * D + d[None, :], rounded, mask=inside, cache_modifier=".cs")
        values = rounded.to(tl.float32)
    result, rstd = _normed(values, w, eps, D)
    tl.store(y + r[:, None] * D + d[None, :], result.to(y.dtype.element_ty), mask=inside, cache_modifier=".cs")
    tl.store(rstd_R + r, rstd, mask=r < num_rows)


@triton.jit
def _input_gradient(
    dy, x, w_D, rstd_R, add, dx, stride_dy, stride_x, stride_add, num_rows,
    D: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx, and to that `add`."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (r < num_rows)[:, None] & (d < D)[None, :]
    slope = _read(dy + _begin(r, stride_dy, D, HEADS)[:, None] + d[None, :], inside)
    values = _read(x + _begin(r, stride_x, D, HEADS)[:, None] + d[None, :], inside)
    w = tl.load(w_D + d, mask=d < D, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_R + r, mask=r < num_rows, other=0.0)
    result = _past(slope, values, w, rstd, D).to(dx.dtype.element_ty)
    if add is not None:
        more = _read(add + _begin(r, stride_add, D, HEADS)[:, None] + d[None, :], inside)
        result = (result.to(tl.float32) + more).to(dx.dtype.element_ty)
    tl.store(dx + r[:, None] * D + d[None, :], result, mask=inside, cache_modifier=".cs")


@triton.jit
def _partial_weight_gradient(
    dy, x, rstd_R, partial_PD, stride_dy, stride_x, num_rows,
    D: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Split p of a block of columns sums the row tiles p, p + SPLITS, …"""
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    split = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for first in tl.range(split * ROWS, num_rows, SPLITS * ROWS):
        r = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (r < num_rows)[:, None] & (d < D)[None, :]
        slope = _read(dy + _begin(r, stride_dy, D, HEADS)[:, None] + d[None, :], inside)
        values = _read(x + _begin(r, stride_x, D, HEADS)[:, None] + d[None, :], inside)
        rstd = tl.load(rstd_R + r, mask=r < num_rows, other=0.0)
        total += slope * values * rstd[:, None]
    tl.store(partial_PD + split * D + d, tl.sum(total, 0), mask=d < D)


@triton.jit
def _total_weight_gradient(
    acc_D, partial_PD, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr
):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for first in tl.range(0, SPLITS, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        inside = (p < SPLITS)[:, None] & (d < D)[None, :]
        total += tl.load(partial_PD + p[:, None] * D + d[None, :], mask=inside, other=0.0)
    acc = tl.load(acc_D + d, mask=d < D, other=0.0)
    tl.store(acc_D + d, acc + tl.sum(total, 0).to(acc.dtype), mask=d < D)
