"""A short causal convolution of each column and a SiLU: y = silu(Σ_j w_j·x[t - j]), in front of a delta rule.

T rows in B sequences of S, N columns, J taps, of which the last is that of the row itself. A sequence has zeros in
front of it. Where sequences hold several documents, so has each: `starts` [T] has for each row the position of the
first of its document in its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from runtime.ops.wide import wide


def convolve(x_TN: Tensor, w_NJ: Tensor, sequence: int, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x_TN, w_NJ -> y_TN, and how many rows of its sequence, or document, are before each row: int32 [T].

    `x` may be a view of columns. `starts` int32 [T].
    """
    before_T = torch.arange(sequence, dtype=torch.int32, device=x_TN.device).repeat(x_TN.shape[0] // sequence)
    before_T = before_T if starts is None else before_T - starts
    return silu(_sums(x_TN, w_NJ, before_T)).to(x_TN.dtype), before_T


def convolve_dgrad(dy_TN: Tensor, x_TN: Tensor, w_NJ: Tensor, before_T: Tensor) -> Tensor:
    """dy_TN, x_TN, w_NJ, before_T -> dx_TN."""
    dsum_TN, dx_TN = _dsums(dy_TN, x_TN, w_NJ, before_T), torch.zeros_like(x_TN, dtype=wide(x_TN[:0]).dtype)
    for back, w_N, has_T1 in _taps(w_NJ, before_T):
        dx_TN.add_(_moved(dsum_TN * has_T1, -back).mul_(w_N))
    return dx_TN.to(x_TN.dtype).contiguous()


def convolve_wgrad(dy_TN: Tensor, x_TN: Tensor, w_NJ: Tensor, before_T: Tensor) -> Tensor:
    """dy_TN, x_TN, w_NJ, before_T -> dw_NJ."""
    dsum_TN, x_TN = _dsums(dy_TN, x_TN, w_NJ, before_T), wide(x_TN)
    of_taps = [(_moved(x_TN, back) * has_T1 * dsum_TN).sum(0) for back, _, has_T1 in _taps(w_NJ, before_T)]
    return torch.stack(of_taps[::-1], dim=1).to(w_NJ.dtype)


def convolve_wgrad_(acc_NJ: Tensor, dy_TN: Tensor, x_TN: Tensor, w_NJ: Tensor, before_T: Tensor) -> None:
    """acc_NJ += dw_NJ of the rest, in FP32 at least."""
    acc_NJ.add_(convolve_wgrad(dy_TN, x_TN, wide(w_NJ), before_T))


def _sums(x_TN: Tensor, w_NJ: Tensor, before_T: Tensor) -> Tensor:
    """What the SiLU is of, FP32 at least."""
    x_TN = wide(x_TN)
    sum_TN = torch.zeros_like(x_TN, memory_format=torch.contiguous_format)
    for back, w_N, has_T1 in _taps(w_NJ, before_T):
        sum_TN.add_((_moved(x_TN, back) * has_T1).mul_(w_N))
    return sum_TN


def _dsums(dy_TN: Tensor, x_TN: Tensor, w_NJ: Tensor, before_T: Tensor) -> Tensor:
    """The gradient of that."""
    sum_TN = _sums(x_TN, w_NJ, before_T)
    share_TN = torch.sigmoid(sum_TN)
    return sum_TN.mul_(1 - share_TN).add_(1).mul_(share_TN).mul_(wide(dy_TN))


def _taps(w_NJ: Tensor, before_T: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """How many rows back each tap reads, its factors, and which rows have so many before them."""
    for back in range(w_NJ.shape[1]):
        yield back, wide(w_NJ[:, -1 - back]), (before_T >= back)[:, None]


def _moved(x_TN: Tensor, by: int) -> Tensor:
    """x_TN, each row `by` places later, or earlier; zeros come in."""
    T = x_TN.shape[0]
    by = max(-T, min(T, by))
    return pad(x_TN, (0, 0, by, -by))


OPS = (convolve, convolve_dgrad, convolve_wgrad, convolve_wgrad_)
