"""Entries that stand for several tokens each: sums of their values, by a softmax over their gates, column by column.

DeepSeek-AI, "DeepSeek-V4", arXiv 2606.19348, §2.3. T tokens in B sequences of S · E = S // rate windows of a sequence ·
W columns of values, and as many of gates · C columns of an entry. Tokens behind the last full window are in no entry.

Without overlap an entry is of the `rate` tokens of its window, and C = W (HCA). With overlap each token has two series,
W = 2·C: an entry is of the second series of its window and of the first series of the window in front (CSA). The first
window has none in front, and is of `rate` numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.ops.wide import wide, wide_dtype


def compress(x: Tensor, bias: Tensor, sequence: int, overlap: bool) -> tuple[Tensor, Tensor]:
    """x [T, 2·W], values and gates; bias [rate, W], added to the gates of a window -> y [B·E, C], lse [B, E, C].

    lse is the logarithm of the softmax's denominator, FP32 at least. x may be a view of columns.
    """
    values_BEsC, gates_BEsC = _slots(x, bias, len(x) // sequence, overlap)
    lse_BEC = gates_BEsC.logsumexp(dim=2)
    y_BEC = ((gates_BEsC - lse_BEC[:, :, None]).exp() * values_BEsC).sum(dim=2)
    return y_BEC.flatten(0, 1).to(x.dtype), lse_BEC


def compress_dgrad(dy: Tensor, x: Tensor, bias: Tensor, lse: Tensor) -> Tensor:
    """dy [B·E, C] and the forward's inputs and results -> dx [T, 2·W]."""
    B, _, C = lse.shape
    dvalues_BErW, dgates_BErW = (_unslotted(each, bias.shape[1] > C) for each in _gradients(dy, x, bias, lse))
    dx_BsX = torch.cat((dvalues_BErW, dgates_BErW), dim=-1).flatten(1, 2)
    tail = len(x) // B - dx_BsX.shape[1]
    return pad(dx_BsX, (0, 0, 0, tail)).flatten(0, 1).to(x.dtype)


def compress_wgrad(dy: Tensor, x: Tensor, bias: Tensor, lse: Tensor) -> Tensor:
    """dy [B·E, C] and the forward's inputs and results -> dbias [rate, W]."""
    _, dgates_BEsC = _gradients(dy, x, bias, lse)
    return _unslotted(dgates_BEsC, bias.shape[1] > lse.shape[2]).sum(dim=(0, 1)).to(bias.dtype)


def compress_wgrad_(acc: Tensor, dy: Tensor, x: Tensor, bias: Tensor, lse: Tensor) -> None:
    """acc [rate, W] += dbias of (dy, x, bias, lse), in the dtype of acc."""
    acc.add_(compress_wgrad(dy, x, bias.to(wide_dtype(bias.dtype)), lse))


def _slots(x: Tensor, bias: Tensor, B: int, overlap: bool) -> tuple[Tensor, Tensor]:
    """Values and gates of what is in an entry, [B, E, slots, C]: those of its window behind those of the one before."""
    rate, W = bias.shape
    S = len(x) // B
    x_BErX = wide(x).view(B, S, 2 * W)[:, : S // rate * rate].unflatten(1, (S // rate, rate))
    values_BErW, gates_BErW = x_BErX[..., :W], x_BErX[..., W:] + wide(bias)
    if not overlap:
        return values_BErW, gates_BErW
    return _with_previous(values_BErW, 0.0), _with_previous(gates_BErW, -torch.inf)


def _with_previous(x_BErW: Tensor, before: float) -> Tensor:
    """The first half of the columns of each window's predecessor, and below it the second half of its own."""
    first_BErC, second_BErC = x_BErW.chunk(2, dim=-1)
    previous_BErC = pad(first_BErC, (0, 0, 0, 0, 1, 0), value=before)[:, : x_BErW.shape[1]]
    return torch.cat((previous_BErC, second_BErC), dim=2)


def _unslotted(dx_BEsC: Tensor, overlap: bool) -> Tensor:
    """Gradients of what is in entries -> those of the columns of windows, [B, E, rate, W]: the adjoint of `_slots`."""
    if not overlap:
        return dx_BEsC
    previous_BErC, second_BErC = dx_BEsC.chunk(2, dim=2)
    first_BErC = pad(previous_BErC[:, 1:], (0, 0, 0, 0, 0, min(1, dx_BEsC.shape[1])))
    return torch.cat((first_BErC, second_BErC), dim=-1)


def _gradients(dy: Tensor, x: Tensor, bias: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Those of values and of gates, [B, E, slots, C]: p·dy, and p·(v − Σ p·v)·dy."""
    values_BEsC, gates_BEsC = _slots(x, bias, len(lse), bias.shape[1] > lse.shape[2])
    shares_BEsC = (gates_BEsC - lse[:, :, None]).exp()
    y_BE1C = (shares_BEsC * values_BEsC).sum(dim=2, keepdim=True)
    dvalues_BEsC = shares_BEsC * wide(dy).view(lse.shape)[:, :, None]
    return dvalues_BEsC, dvalues_BEsC * (values_BEsC - y_BE1C)


OPS = (compress, compress_dgrad, compress_wgrad, compress_wgrad_)
