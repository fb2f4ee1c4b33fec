# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""The gradient of an RMSNorm whose dy is gathered from the rows of experts; with it, the norm computed again."""
# T rows · D columns. A program owns ROWS whole rows and holds them in registers: each is read once, for the sum that dy
# is, for the norm, and for the gradient. Everything is computed in FP32, and rounded wherever an op by itself would
# store it.
# K choices of a token · S = T·K rows of experts: row j holds choice order_S[j] = t·K + k; place_TK is the inverse of
# that, made in a first launch. The rows of a token are added in the order of k: no atomics, and equal bits from run to
# run.
import torch
import triton
import triton.language as tl

D = 192
K = 4
INVERT = {'BLOCK_S': 256, 'num_warps': 4, 'enable_fp_fusion': True}
LAUNCH = {'ROWS': 8, 'BLOCK_D': 256, 'num_warps': 4, 'enable_fp_fusion': True}


def permuted_rmsnorm_dgrad_add(drows_SD, order_S, top_k, other_TD, more_TD, x_TD, w_D, rstd_T, add_TD):
    """(dy_TD = (other + the rows of each token) + more, dx_TD + add). Here and below x and add may be views of some
    columns of wider tensors."""
    dy_TD = x_TD.new_empty(x_TD.shape)
    parts = _rows(drows_SD, order_S, top_k, other_TD, more_TD)
    return dy_TD, _launch(parts, x_TD, w_D, rstd_T, add_TD, dy_TD)


def permuted_rmsnorm_again_dgrad_add(drows_SD, order_S, top_k, other_TD, more_TD, x_TD, w_D, eps, add_TD):
    """(dy_TD; y_TD, rstd_T of x; dx_TD + add)."""
    dy_TD, y_TD, rstd_T = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape), _statistics(x_TD)
    parts = _rows(drows_SD, order_S, top_k, other_TD, more_TD)
    return dy_TD, y_TD, rstd_T, _launch(parts, x_TD, w_D, rstd_T, add_TD, dy_TD, y_TD, eps=eps)


def _rows(drows_SD, order_S, top_k, other_TD, more_TD):
    """What dy is made of, for the kernel."""
    assert all(each is None or each.is_contiguous() for each in (drows_SD, other_TD, more_TD))
    return drows_SD, _invert(order_S, top_k), other_TD, more_TD, K


def _launch(parts, x_TD, w_D, rstd_T, add_TD, dy_TD, y_TD=None, s_TB=None, eps=0.0, pow2=False):
    """dx_TD + add; dy, if it is in parts, and the norm with rstd, if it is computed again, are written too."""
    assert x_TD.shape[1] == D
    dx_TD, num_rows = x_TD.new_empty(x_TD.shape), x_TD.shape[0]
    given = x_TD, w_D, rstd_T, add_TD, _stride(x_TD), _stride(add_TD)
    grid = (triton.cdiv(num_rows, LAUNCH["ROWS"]),)
    _gradient[grid](*parts, *given, dy_TD, y_TD, s_TB, dx_TD, num_rows, eps, D, pow2, **LAUNCH)
    return dx_TD


def _statistics(x_TD):
    return torch.empty(x_TD.shape[0], dtype=torch.float32, device=x_TD.device)


def _stride(x):
    """From row to row of a view of columns."""
    assert x.stride(1) == 1
    return x.stride(0)


def _invert(order_S, top_k):
    """place_TK: the row of each choice."""
    assert order_S.is_contiguous() and top_k == K
    num_rows = order_S.shape[0]
    place_TK = torch.empty(num_rows // K, K, dtype=torch.int32, device=order_S.device)
    _inverse[(triton.cdiv(num_rows, INVERT["BLOCK_S"]),)](order_S, place_TK, num_rows, **INVERT)
    return place_TK


@triton.jit
def _inverse(order_S, place_TK, num_rows, BLOCK_S: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = j < num_rows
    tl.store(place_TK + tl.load(order_S + j, mask=inside), j.to(tl.int32), mask=inside)
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
def _gradient(
    rows_SD, place_TK, other, more, K: tl.constexpr,
    x, w_D, rstd_T, add, stride_x, stride_add, dy, y, s, dx, num_rows, eps,
    D: tl.constexpr, POW2: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`dy` is None where it is one part, `y` where rstd is given, and `s` where y is not quantised."""
    dtype: tl.constexpr = dx.dtype.element_ty
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (t < num_rows)[:, None] & (d < D)[None, :]
    at = t[:, None] * D + d[None, :]
    slope = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place_TK + t * K + k, mask=t < num_rows, other=0).to(tl.int64)
        slope += _read(rows_SD + row[:, None] * D + d[None, :], inside)
    slope = (_read(other + at, inside) + slope.to(dtype).to(tl.float32)).to(dtype)
    if more is not None:
        slope = (slope.to(tl.float32) + _read(more + at, inside)).to(dtype)
    tl.store(dy + at, slope, mask=inside, cache_modifier=".cs")
    slope = slope.to(tl.float32)
    values = _read(x + t[:, None] * stride_x + d[None, :], inside)
    w = tl.load(w_D + d, mask=d < D, other=0.0).to(tl.float32)
    if y is None:
        rstd = tl.load(rstd_T + t, mask=t < num_rows, other=0.0)
    else:
        result, rstd = _normed(values, w, eps, D)
        result = result.to(dtype)
        tl.store(y + at, result, mask=inside, cache_modifier=".cs")
        tl.store(rstd_T + t, rstd, mask=t < num_rows)
    result = _past(slope, values, w, rstd, D).to(dtype).to(tl.float32)
    result += _read(add + t[:, None] * stride_add + d[None, :], inside)
    tl.store(dx + at, result.to(dtype), mask=inside, cache_modifier=".cs")
