"""Manifold-constrained hyper-connections: n residual streams. Each part of a layer reads a weighted sum of them and
adds its output to all of them; a matrix whose rows and columns sum to 1 mixes them.

Xie et al., "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880, as in DeepSeek-V4, arXiv 2606.19348.

T tokens · D hidden · n streams · N = n·D numbers per token, stream after stream · M logits per token: n for `pre` and,
if streams are mixed, n for `post` and C = n² for `comb`, row after row · S scales, one per part. With BF16 activations,
logits, the weights computed from them, and all sums are FP32. The backward recomputes the Sinkhorn-Knopp rounds from
the stored logits.
"""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor

from runtime.ops.product import add_product_, wide, wide_product


def hyper_products(h_TN: Tensor, fn_MN: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """h_TN, fn_MN -> products_TM = rmsnorm(h)·fnᵀ with an unweighted norm, rstd_T."""
    rstd_T = torch.rsqrt(wide(h_TN).square().mean(dim=1) + eps)
    return wide_product(h_TN, fn_MN.t()).mul_(rstd_T[:, None]), rstd_T


def hyper_products_dgrad(
    dproducts_TM: Tensor, h_TN: Tensor, fn_MN: Tensor, products_TM: Tensor, rstd_T: Tensor
) -> Tensor:
    """dproducts_TM, h_TN, fn_MN, products_TM, rstd_T -> dh_TN."""
    rstd_T1 = rstd_T[:, None]
    inward_T1 = (dproducts_TM * products_TM).sum(dim=1, keepdim=True) / h_TN.shape[1]
    dh_TN = wide_product(dproducts_TM * rstd_T1, fn_MN)
    return dh_TN.sub_(wide(h_TN) * (inward_T1 * rstd_T1.square())).to(h_TN.dtype)


def hyper_products_wgrad(dproducts_TM: Tensor, h_TN: Tensor, rstd_T: Tensor) -> Tensor:
    """dproducts_TM, h_TN, rstd_T -> dfn_MN."""
    return wide_product((dproducts_TM * rstd_T[:, None]).t(), h_TN).to(h_TN.dtype)


def hyper_products_wgrad_(acc_MN: Tensor, dproducts_TM: Tensor, h_TN: Tensor, rstd_T: Tensor) -> None:
    """acc_MN += dfn_MN of (dproducts_TM, h_TN, rstd_T)."""
    add_product_(acc_MN, (dproducts_TM * rstd_T[:, None]).t(), wide(h_TN))


def scale_parts(logits_TM: Tensor, scale_S: Tensor) -> Tensor:
    """logits_TM, scale_S -> y_TM: the columns of each part times its scale."""
    return (wide(logits_TM) * _scales(scale_S, logits_TM)).to(logits_TM.dtype)


def scale_parts_dgrad(dy_TM: Tensor, scale_S: Tensor) -> Tensor:
    """dy_TM, scale_S -> dlogits_TM."""
    return (wide(dy_TM) * _scales(scale_S, dy_TM)).to(dy_TM.dtype)


def scale_parts_wgrad(dy_TM: Tensor, logits_TM: Tensor, num_parts: int) -> Tensor:
    """dy_TM, logits_TM -> dscale_S, with S = num_parts."""
    dscale_S = logits_TM.new_zeros(num_parts)
    scale_parts_wgrad_(dscale_S, dy_TM, logits_TM)
    return dscale_S


def scale_parts_wgrad_(acc_S: Tensor, dy_TM: Tensor, logits_TM: Tensor) -> None:
    """acc_S += dscale_S of (dy_TM, logits_TM)."""
    each_M = (wide(dy_TM) * wide(logits_TM)).sum(dim=0)
    acc_S.add_(torch.stack([part.sum() for part in each_M.split(_parts(acc_S.shape[0], logits_TM.shape[1]))]))


def hyper_mix(h_TN: Tensor, logits_TM: Tensor, rounds: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """h_TN, logits_TM -> x_TD = Σ_i pre_i·h_i, post_Tn = 2·sigmoid, comb_TC after `rounds` Sinkhorn rounds."""
    pre_Tn, post_Tn, comb_Tnn = _weights(logits_TM, eps)
    return _collapse(h_TN, pre_Tn), post_Tn, _rounds(comb_Tnn, rounds, eps)[-1].flatten(1)


def hyper_mix_dgrad(
    dx_TD: Tensor, dpost_Tn: Tensor, dcomb_TC: Tensor, h_TN: Tensor, logits_TM: Tensor, rounds: int, eps: float
) -> tuple[Tensor, Tensor]:
    """dx_TD, dpost_Tn, dcomb_TC, h_TN, logits_TM -> dh_TN, dlogits_TM."""
    pre_Tn, post_Tn, start_Tnn = _weights(logits_TM, eps)
    dh_TN, dpre_Tn = _collapse_gradients(dx_TD, h_TN, pre_Tn, eps)
    comb_Tnn = _rounds_gradient(dcomb_TC.unflatten(1, start_Tnn.shape[1:]), start_Tnn, rounds, eps)
    soft_Tnn = start_Tnn - eps
    dsoft_Tnn = soft_Tnn * (comb_Tnn - (comb_Tnn * soft_Tnn).sum(dim=2, keepdim=True))
    return dh_TN, torch.cat((dpre_Tn, dpost_Tn * post_Tn * (1 - post_Tn / 2), dsoft_Tnn.flatten(1)), dim=1)


def hyper_collapse(h_TN: Tensor, logits_Tn: Tensor, eps: float) -> Tensor:
    """h_TN, logits_Tn -> x_TD = Σ_i pre_i·h_i."""
    return _collapse(h_TN, logits_Tn.sigmoid() + eps)


def hyper_collapse_dgrad(dx_TD: Tensor, h_TN: Tensor, logits_Tn: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """dx_TD, h_TN, logits_Tn -> dh_TN, dlogits_Tn."""
    return _collapse_gradients(dx_TD, h_TN, logits_Tn.sigmoid() + eps, eps)


def hyper_add(h_TN: Tensor, y_TD: Tensor, post_Tn: Tensor, comb_TC: Tensor) -> Tensor:
    """h_TN, y_TD, post_Tn, comb_TC -> the streams after a part with output y: stream k = post_k·y + Σ_i comb_ik·h_i."""
    h_TnD, comb_Tnn = _streams(h_TN, post_Tn), _matrices(comb_TC, post_Tn)
    out_TnD = torch.baddbmm(post_Tn[:, :, None] * wide(y_TD)[:, None], comb_Tnn.transpose(1, 2), wide(h_TnD))
    return out_TnD.flatten(1).to(h_TN.dtype)


def hyper_add_dgrad(
    dout_TN: Tensor, h_TN: Tensor, y_TD: Tensor, post_Tn: Tensor, comb_TC: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dout_TN, h_TN, y_TD, post_Tn, comb_TC -> dh_TN, dy_TD, dpost_Tn, dcomb_TC."""
    dout_TnD, h_TnD = wide(_streams(dout_TN, post_Tn)), wide(_streams(h_TN, post_Tn))
    dh_TnD = torch.bmm(_matrices(comb_TC, post_Tn), dout_TnD)
    dy_TD = torch.bmm(post_Tn[:, None], dout_TnD)[:, 0]
    dpost_Tn = torch.bmm(dout_TnD, wide(y_TD)[:, :, None])[:, :, 0]
    dcomb_Tnn = torch.bmm(h_TnD, dout_TnD.transpose(1, 2))
    return dh_TnD.flatten(1).to(h_TN.dtype), dy_TD.to(y_TD.dtype).contiguous(), dpost_Tn, dcomb_Tnn.flatten(1)


def hyper_copy(x_TD: Tensor, streams: int) -> Tensor:
    """x_TD -> y_TN: `streams` copies of x."""
    return x_TD.repeat(1, streams)


def hyper_copy_dgrad(dy_TN: Tensor, streams: int) -> Tensor:
    """dy_TN -> dx_TD, the sum over the streams."""
    return wide(dy_TN).unflatten(1, (streams, -1)).sum(dim=1).to(dy_TN.dtype)


# ---------------------------------------------------------------- parts of a token's logits


def _parts(num_parts: int, columns: int) -> tuple[int, ...]:
    """Return the number of columns of each part: all for one part, else those of pre, post and comb."""
    if num_parts == 1:
        return (columns,)
    n = _num_streams(columns)
    return n, n, n * n


def _num_streams(columns: int) -> int:
    """Return n, given n² + 2n columns."""
    return isqrt(columns + 1) - 1


def _scales(scale_S: Tensor, logits_TM: Tensor) -> Tensor:
    """Return the scale of each column, [M]."""
    parts = _parts(scale_S.shape[0], logits_TM.shape[1])
    return torch.cat([scale.expand(columns) for scale, columns in zip(wide(scale_S), parts, strict=True)])


def _weights(logits_TM: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return pre_Tn, post_Tn, and comb_Tnn before the first round."""
    n = _num_streams(logits_TM.shape[1])
    pre_Tn, post_Tn, comb_TC = logits_TM.split((n, n, n * n), dim=1)
    return pre_Tn.sigmoid() + eps, 2 * post_Tn.sigmoid(), comb_TC.unflatten(1, (n, n)).softmax(dim=2) + eps


def _rounds(comb_Tnn: Tensor, rounds: int, eps: float) -> list[Tensor]:
    """Return the result of each division: by column sums first, then in each further round by row and column sums."""
    results = []
    for dim in _dims(rounds):
        comb_Tnn = comb_Tnn / (comb_Tnn.sum(dim=dim, keepdim=True) + eps)
        results.append(comb_Tnn)
    return results


def _rounds_gradient(gradient_Tnn: Tensor, start_Tnn: Tensor, rounds: int, eps: float) -> Tensor:
    """Return the gradient of the matrix before the rounds. For c = a / s with s = Σa + eps, da = (dc − Σ dc·c) / s."""
    results = _rounds(start_Tnn, rounds, eps)
    for dim, input_Tnn, result_Tnn in reversed([*zip(_dims(rounds), (start_Tnn, *results), results, strict=False)]):
        inward = (gradient_Tnn * result_Tnn).sum(dim=dim, keepdim=True)
        gradient_Tnn = (gradient_Tnn - inward) / (input_Tnn.sum(dim=dim, keepdim=True) + eps)
    return gradient_Tnn


def _dims(rounds: int) -> tuple[int, ...]:
    """Return the dimension summed over in each division, in order: 1 for column sums, 2 for row sums."""
    return (1, *((2, 1) * (rounds - 1)))


# ---------------------------------------------------------------- streams


def _streams(h_TN: Tensor, like_Tn: Tensor) -> Tensor:
    """Return h_TnD, a view."""
    return h_TN.unflatten(1, (like_Tn.shape[1], -1))


def _matrices(comb_TC: Tensor, like_Tn: Tensor) -> Tensor:
    """Return comb_Tnn, a view."""
    return comb_TC.unflatten(1, (like_Tn.shape[1], -1))


def _collapse(h_TN: Tensor, pre_Tn: Tensor) -> Tensor:
    """Return Σ_i pre_i·h_i."""
    return torch.bmm(pre_Tn[:, None], wide(_streams(h_TN, pre_Tn)))[:, 0].to(h_TN.dtype).contiguous()


def _collapse_gradients(dx_TD: Tensor, h_TN: Tensor, pre_Tn: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return dh_TN and the gradient of the logits of pre."""
    dh_TnD = pre_Tn[:, :, None] * wide(dx_TD)[:, None]
    dpre_Tn = torch.bmm(wide(_streams(h_TN, pre_Tn)), wide(dx_TD)[:, :, None])[:, :, 0]
    sigmoid_Tn = pre_Tn - eps
    return dh_TnD.flatten(1).to(h_TN.dtype), dpre_Tn * sigmoid_Tn * (1 - sigmoid_Tn)


OPS = (
    *(hyper_products, hyper_products_dgrad, hyper_products_wgrad, hyper_products_wgrad_),
    *(scale_parts, scale_parts_dgrad, scale_parts_wgrad, scale_parts_wgrad_),
    *(hyper_mix, hyper_mix_dgrad, hyper_collapse, hyper_collapse_dgrad),
    *(hyper_add, hyper_add_dgrad, hyper_copy, hyper_copy_dgrad),
)
