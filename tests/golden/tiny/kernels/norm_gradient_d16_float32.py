# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""The gradient of an RMSNorm, of a dy in one part or two; with it, the norm computed again."""
# T rows · D columns. A program owns ROWS whole rows and holds them in registers: each is read once, for the sum that dy
# is, for the norm, and for the gradient. Everything is computed in FP32, and rounded wherever an op by itself would
# store it.
import torch
import triton
import triton.language as tl

D = 16
LAUNCH = {'ROWS': 128, 'BLOCK_D': 16, 'num_warps': 4, 'enable_fp_fusion': True}


def rmsnorm_again_dgrad_add(dy_TD, x_TD, w_D, eps, add_TD):
    """(y_TD, rstd_T of x; dx_TD + add). Here and below dy, its parts, x and add may be views of some columns of wider
    tensors."""
    y_TD, rstd_T = x_TD.new_empty(x_TD.shape), _statistics(x_TD)
    return y_TD, rstd_T, _launch(_sum(dy_TD), x_TD, w_D, rstd_T, add_TD, None, y_TD, eps=eps)


def sum_rmsnorm_dgrad_add(a_TD, b_TD, x_TD, w_D, rstd_T, add_TD):
    """(dy_TD = a + b, dx_TD + add)."""
    dy_TD = x_TD.new_empty(x_TD.shape)
    return dy_TD, _launch(_sum(a_TD, b_TD), x_TD, w_D, rstd_T, add_TD, dy_TD)


def sum_rmsnorm_again_dgrad_add(a_TD, b_TD, x_TD, w_D, eps, add_TD):
    """(dy_TD = a + b; y_TD, rstd_T of x; dx_TD + add)."""
    dy_TD, y_TD, rstd_T = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape), _statistics(x_TD)
    return dy_TD, y_TD, rstd_T, _launch(_sum(a_TD, b_TD), x_TD, w_D, rstd_T, add_TD, dy_TD, y_TD, eps=eps)


def _sum(a_TD, b_TD=None):
    """What dy is made of, for the kernel."""
    return a_TD, b_TD, _stride(a_TD), 0 if b_TD is None else _stride(b_TD)


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
    a, b, stride_a, stride_b,
    x, w_D, rstd_T, add, stride_x, stride_add, dy, y, s, dx, num_rows, eps,
    D: tl.constexpr, POW2: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`dy` is None where it is one part, `y` where rstd is given, and `s` where y is not quantised."""
    dtype: tl.constexpr = dx.dtype.element_ty
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (t < num_rows)[:, None] & (d < D)[None, :]
    at = t[:, None] * D + d[None, :]
    slope = _read(a + t[:, None] * stride_a + d[None, :], inside)
    if b is not None:
        total = (slope + _read(b + t[:, None] * stride_b + d[None, :], inside)).to(dtype)
        tl.store(dy + at, total, mask=inside, cache_modifier=".cs")
        slope = total.to(tl.float32)
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
