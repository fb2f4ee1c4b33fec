"""The router: choosing experts, and permuting token rows into expert order and back, in BF16 and in FP8."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import embedding_bag

from runtime.ops.native import ops as native
from runtime.ops.native.library import runs_natively
from runtime.ops.quantise import quantise

# --- Choosing experts: scores, groups of experts, and a bias that affects only the choice
#
# Sigmoid scores: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2. Softmax scores: "DeepSeek-V2", 2024,
# section 2.1.3, and its published code. T tokens, E experts, K choices.

THRESHOLD = 40.0  # above 37, softplus(x) equals x bit for bit, even in FP64
TINY = 1e-20  # added to the sum of the chosen scores, as in DeepSeek-V2 and V3
MAX_VECTOR = 64  # upper bound on the elements that torch computes together: two 512-bit vectors of BF16


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    softmax: bool,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """logits_TE, bias_E or None -> gate_TK, expert_TK (int64).

    Scores are the softmax over all experts, or the sigmoid of each logit. Experts are chosen by score + bias among the
    `top_groups` groups with the largest group scores: the score of the group's best expert (softmax), or the sum of its
    two best (sigmoid; of one in a group of one). Ties go to the lower index, and NaN ranks above all numbers. The bias
    must be finite. The gate weight is the score without bias, divided by the sum of the chosen scores if `normalize`,
    times `scale`.
    """
    counted = 1 if softmax else 2
    return _choose_experts(scores(logits_TE, softmax), bias_E, counted, groups, top_groups, top_k, normalize, scale)


def _choose_experts(
    score_TE: Tensor,
    bias_E: Tensor | None,
    counted: int,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return gate_TK, expert_TK from scores. A group's score is the sum of its `counted` best experts."""
    if _runs_natively(score_TE):
        return native.choose(score_TE, bias_E, counted, groups, top_groups, top_k, normalize, scale)
    choice_TE = score_TE if bias_E is None else score_TE + bias_E
    expert_TK = top_indices(_among_best_groups(choice_TE, groups, top_groups, counted), top_k)
    return weigh_chosen_scores(score_TE, expert_TK, normalize, scale), expert_TK


def scores(logits_TE: Tensor, softmax: bool) -> Tensor:
    """logits_TE -> score_TE, in their dtype."""
    return torch.softmax(logits_TE, dim=-1) if softmax else sigmoid(logits_TE)


def apply_by_element(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function so that an element's result does not depend on its position. torch computes the
    elements after the last whole vector differently, so this pads to whole vectors."""
    padding = -x.numel() % MAX_VECTOR
    if not padding or not x.is_cpu:
        return function(x)
    return function(functional.pad(x.reshape(-1), (0, padding)))[: x.numel()].view(x.shape)


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of each element, through `apply_by_element`."""
    return apply_by_element(torch.sigmoid, x)


def top_indices(x_TE: Tensor, num: int) -> Tensor:
    """x_TE -> index_TN (int64) of the `num` largest of each row, in descending order; ties in ascending order of index.

    `topk` returns ties in any order, and a stable sort takes 5 times as long: this takes 6.5 ms, `topk` 8.4, the sort
    36 (T 4096, E 256, num 8, FP32, one core).
    """
    left_TE, indices = x_TE.clone(), []
    for _ in range(num):
        indices.append(left_TE.max(dim=-1, keepdim=True).indices)  # the first of ties
        left_TE.scatter_(1, indices[-1], -torch.inf)
    return torch.cat(indices, dim=1)


def _among_best_groups(choice_TE: Tensor, groups: int, top_groups: int, num_best: int) -> Tensor:
    """Return choice_TE with −inf outside the `top_groups` groups whose `num_best` best experts have the largest sum."""
    if top_groups == groups:
        return choice_TE
    choice_TGM = choice_TE.unflatten(1, (groups, -1))
    best_TG = choice_TGM.topk(min(num_best, choice_TGM.shape[2]), dim=-1).values.sum(dim=-1)
    dropped_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, top_indices(best_TG, top_groups), False)
    return choice_TGM.masked_fill(dropped_TG[:, :, None], -torch.inf).flatten(1)


def route_dgrad(
    dgate_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, softmax: bool, normalize: bool, scale: float
) -> Tensor:
    """dgate_TK, logits_TE, expert_TK -> dlogits_TE. The choice has no gradient."""
    score_TE = scores(logits_TE, softmax)
    if _runs_natively(score_TE):
        return native.weigh_dgrad(dgate_TK, score_TE, expert_TK, normalize, scale, 2 if softmax else 1)
    score_TK = score_TE.gather(1, expert_TK)
    dlogits_TK = _dscore(dgate_TK, score_TK, normalize, scale) * score_TK
    if not softmax:
        dlogits_TK *= 1 - score_TK
        return torch.zeros_like(logits_TE).scatter_(1, expert_TK, dlogits_TK)  # the K experts of a token are distinct
    dlogits_TE = score_TE * -dlogits_TK.sum(dim=-1, keepdim=True)
    return dlogits_TE.scatter_add_(1, expert_TK, dlogits_TK)


def _runs_natively(score_TE: Tensor) -> bool:
    """Whether what follows the scores runs in C++: its operands are FP32, and indices."""
    return runs_natively(score_TE) and score_TE.dtype == torch.float32


def _dscore(dgate_TK: Tensor, score_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    """dgate_TK, the chosen scores score_TK -> dscore_TK."""
    dscore_TK = dgate_TK * scale
    if not normalize:
        return dscore_TK
    total_T1 = score_TK.sum(dim=-1, keepdim=True) + TINY
    mean_T1 = (dscore_TK * score_TK).sum(dim=-1, keepdim=True) / total_T1
    return (dscore_TK - mean_T1) / total_T1


# ---------------------------------------------------------------- other scores
def sqrt_softplus(logits_TE: Tensor) -> Tensor:
    """logits_TE -> score_TE = √log(1 + e^logit), the scores of DeepSeek-V4."""
    return apply_by_element(lambda x: functional.softplus(x, threshold=THRESHOLD).sqrt_(), logits_TE)


def sqrt_softplus_dgrad(dscore_TE: Tensor, logits_TE: Tensor, score_TE: Tensor) -> Tensor:
    """dscore_TE, logits_TE, score_TE -> dlogits_TE = dscore·sigmoid(logit) / (2·score); 0 where the score is 0."""
    slope_TE = torch.sigmoid(logits_TE).div_(2 * score_TE).masked_fill_(score_TE == 0, 0)
    return slope_TE.mul_(dscore_TE)


def route_scores(
    score_TE: Tensor,
    bias_E: Tensor | None,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """score_TE, bias_E or None -> gate_TK, expert_TK (int64): `route` with scores instead of logits; groups are scored
    as with sigmoid."""
    return _choose_experts(score_TE, bias_E, 2, groups, top_groups, top_k, normalize, scale)


def route_scores_dgrad(dgate_TK: Tensor, score_TE: Tensor, expert_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    """dgate_TK, score_TE, expert_TK -> dscore_TE."""
    if _runs_natively(score_TE):
        return native.weigh_dgrad(dgate_TK, score_TE, expert_TK, normalize, scale, 0)
    dscore_TK = _dscore(dgate_TK, score_TE.gather(1, expert_TK), normalize, scale)
    return torch.zeros_like(score_TE).scatter_(1, expert_TK, dscore_TK)


# ---------------------------------------------------------------- experts chosen in advance
def replay_choices(expert_TK: Tensor, given_TK: Tensor) -> Tensor:
    """expert_TK, given_TK (int64) -> expert_TK, replaced by given_TK where that is ≥ 0."""
    return torch.where(given_TK >= 0, given_TK, expert_TK)


def table_choices(tokens_T: Tensor, table_VK: Tensor) -> Tensor:
    """tokens_T (int64), table_VK (int32) -> expert_TK (int64): each token's row of the table."""
    return table_VK.index_select(0, tokens_T).long()


def weigh_chosen(logits_TE: Tensor, expert_TK: Tensor, softmax: bool, normalize: bool, scale: float) -> Tensor:
    """logits_TE, expert_TK -> gate_TK: the gate weights `route` would return for these experts."""
    return weigh_chosen_scores(scores(logits_TE, softmax), expert_TK, normalize, scale)


def weigh_chosen_scores(score_TE: Tensor, expert_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    """score_TE, expert_TK -> gate_TK: `weigh_chosen` with scores instead of logits."""
    if _runs_natively(score_TE):
        return native.weigh(score_TE, expert_TK, normalize, scale)
    gate_TK = score_TE.gather(1, expert_TK)
    if normalize:
        gate_TK = gate_TK / (gate_TK.sum(dim=-1, keepdim=True) + TINY)
    return gate_TK * scale


# ---------------------------------------------------------------- gates of shared experts
def sigmoid_gate(logit_T1: Tensor) -> Tensor:
    """logit_T1 -> gate_T = sigmoid(logit)."""
    return sigmoid(logit_T1[:, 0])


def sigmoid_gate_dgrad(dgate_T: Tensor, gate_T: Tensor) -> Tensor:
    """dgate_T, gate_T -> dlogit_T1."""
    return (dgate_T * gate_T * (1 - gate_T))[:, None]


# --- Experts whose width is sharded over ranks: turn choices of experts into choices of slices. T tokens, K choices,
# E experts
#
# Each slice gets the rows of its expert, with their gate weights: the outputs of an expert's slices sum to its output.


def slice_choices(
    gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor, slices: int, apart: int
) -> tuple[Tensor, Tensor]:
    """gate_TK, expert_TK, slots_E -> gate and place (int64) of every slice, [T, K·slices]; a choice's slices are
    adjacent.

    Slice j of expert e is in place slots[e] + j·apart of the layer.
    """
    places_TK = slots_E.index_select(0, expert_TK.flatten()).view_as(expert_TK)
    steps_J = torch.arange(slices, device=slots_E.device) * apart
    return gate_TK.repeat_interleave(slices, dim=1), (places_TK[:, :, None] + steps_J).flatten(1)


def slice_choices_dgrad(dslice_gate_TL: Tensor, slices: int) -> Tensor:
    """dslice_gate [T, K·slices] -> dgate_TK, summed over the slices of a choice."""
    return dslice_gate_TL.unflatten(1, (-1, slices)).sum(2)


# --- Expert rows back to token order, summed over each token's choices. S = T·K rows, T tokens, K choices, D columns
#
# `order_S` comes from `permute`: row j holds choice order[j] = t·K + k.


def places(order_S: Tensor, top_k: int) -> Tensor:
    """order_S -> place_TK: the row that holds choice k of token t, the inverse of `order`."""
    rows_S = torch.arange(order_S.shape[0], device=order_S.device)
    return torch.empty_like(order_S).scatter_(0, order_S, rows_S).view(-1, top_k)


def unpermute(y_SD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """y_SD, order_S -> y_TD: the sum of each token's rows, added in the order of k, so deterministic."""
    if runs_natively(y_SD):
        return native.unpermute(y_SD, order_S, top_k)
    # Gather and add in one pass: 0.17 ms; index_select, then sum: 0.70 (T 2048, K 4, D 256, FP32, one core).
    return embedding_bag(places(order_S, top_k), y_SD, mode="sum")


def unpermute_dgrad(dout_TD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """dout_TD, order_S -> dy_SD: each row gets its token's gradient."""
    if runs_natively(dout_TD):
        return native.take_rows(dout_TD, order_S, top_k)
    return dout_TD.index_select(0, order_S // top_k)


# --- One row per choice of each token, sorted stably by expert
#
# T tokens, K choices, S = T·K rows, E experts, D columns.


def permute(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_TD, gate_TK, expert_TK (int64) -> rows_SD, gate_S, order_S (int64), counts_E (int64).

    Row j holds choice order[j] = t·K + k: token t's row and its gate weight. counts: the number of rows per expert.
    """
    return _sort_rows(x_TD, gate_TK, expert_TK.flatten(), num_experts)


def permute_placed(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`permute` for experts with a placement: expert e is in place slots[e] of the layer (int64, a permutation). Rows
    are in the order of places, and counts are per place.
    """
    return _sort_rows(x_TD, gate_TK, slots_E.index_select(0, expert_TK.flatten()), slots_E.shape[0])


def _sort_rows(
    x_TD: Tensor, gate_TK: Tensor, place_S: Tensor, num_places: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if runs_natively(x_TD) and gate_TK.dtype == torch.float32:
        return native.permute(x_TD, gate_TK, place_S, num_places)
    order_S = torch.argsort(place_S, stable=True)
    rows_SD = x_TD.index_select(0, order_S // gate_TK.shape[1])
    gate_S = gate_TK.flatten().index_select(0, order_S)
    return rows_SD, gate_S, order_S, torch.bincount(place_S, minlength=num_places)


def permute_dgrad(drows_SD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """drows_SD, order_S -> dx_TD, summed over the choices of a token."""
    return unpermute(drows_SD, order_S, top_k)


def permute_gate_dgrad(drow_gate_S: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """drow_gate_S, order_S -> dgate_TK: a separate op, because the router's gradient needs it before dx is needed."""
    return torch.empty_like(drow_gate_S).scatter_(0, order_S, drow_gate_S).view(-1, top_k)


def permute_dgrad_add(drows_SD: Tensor, order_S: Tensor, top_k: int, add_TD: Tensor, more_TD: Tensor | None) -> Tensor:
    """drows_SD, order_S, add_TD, more_TD or None -> (add + permute_dgrad(drows)) + more, each sum rounded.

    Adds all gradients of the permuted input, in the order in which they are added without this op.
    """
    if runs_natively(*(x for x in (drows_SD, add_TD, more_TD) if x is not None)):
        return native.unpermute(drows_SD, order_S, top_k, add_TD, None, more_TD)
    sum_TD = torch.add(add_TD, permute_dgrad(drows_SD, order_S, top_k))
    return sum_TD if more_TD is None else torch.add(sum_TD, more_TD)


# --- Permuting FP8 rows and their scales. T tokens, K choices, S = T·K rows, E experts, D columns, B tiles
#
# Each is the op without `fp8` in its name, applied to the data and to the scales of its rows. Input and output scales
# are stored column by column (runtime/ops/quantise.py).


def permute_fp8(
    x_TD: Tensor, scales_TB: Tensor, gate_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x_TD, scales_TB, gate_TK, expert_TK -> rows_SD, scales_SB, gate_S, order_S, counts_E."""
    rows_SD, *rest = permute(x_TD.view(torch.uint8), gate_TK, expert_TK, num_experts)
    return _with_scales(rows_SD.view(x_TD.dtype), scales_TB, gate_TK.shape[1], *rest)


def permute_placed_fp8(
    x_TD: Tensor, scales_TB: Tensor, gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`permute_fp8` for experts with a placement: expert e is in place slots[e]."""
    rows_SD, *rest = permute_placed(x_TD.view(torch.uint8), gate_TK, expert_TK, slots_E)
    return _with_scales(rows_SD.view(x_TD.dtype), scales_TB, gate_TK.shape[1], *rest)


def route_permute_fp8(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    x_TD: Tensor,
    scales_TB: Tensor,
    slots_E: Tensor | None,
    softmax: bool,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logits_TE, …, x_TD, scales_TB, … -> gate_TK, expert_TK, rows_SD, scales_SB, gate_S, order_S, counts_E."""
    gate_TK, expert_TK = route(logits_TE, bias_E, softmax, groups, top_groups, top_k, normalize, scale)
    if slots_E is None:
        return gate_TK, expert_TK, *permute_fp8(x_TD, scales_TB, gate_TK, expert_TK, logits_TE.shape[1])
    return gate_TK, expert_TK, *permute_placed_fp8(x_TD, scales_TB, gate_TK, expert_TK, slots_E)


def unpermute_fp8_dgrad(dy_TD: Tensor, scales_TB: Tensor, order_S: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """dy_TD, scales_TB, order_S -> dy_SD, scales_SB."""
    dy_SD = unpermute_dgrad(dy_TD.view(torch.uint8), order_S, top_k).view(dy_TD.dtype)
    return dy_SD, _scales(scales_TB, order_S, top_k)


def unpermute_dgrad_quantise(dy_TD: Tensor, order_S: Tensor, top_k: int, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """dy_TD, order_S -> dy_SD, scales_SB: each row is its token's gradient, quantised once per token."""
    return unpermute_fp8_dgrad(*quantise(dy_TD, pow2), order_S, top_k)


def _with_scales(
    rows_SD: Tensor, scales_TB: Tensor, top_k: int, gate_S: Tensor, order_S: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return rows_SD, _scales(scales_TB, order_S, top_k), gate_S, order_S, counts_E


def _scales(scales_TB: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """scales_TB, order_S -> scales_SB: the scales of each row's token."""
    return scales_TB.t().index_select(1, order_S // top_k).t()


# --- The end of an MoE layer in one op: residual + shared experts + routed experts' rows summed by token
#
# S = T·K rows, T tokens, K choices, D columns.


def unpermute_add(h_TD: Tensor, shared_TD: Tensor | None, y_SD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """h_TD, shared_TD or None, y_SD, order_S -> (h + shared) + unpermute(y), each of the three sums rounded."""
    if runs_natively(*(x for x in (y_SD, h_TD, shared_TD) if x is not None)):
        return native.unpermute(y_SD, order_S, top_k, h_TD, shared_TD)
    sum_TD = h_TD if shared_TD is None else h_TD + shared_TD
    return sum_TD + unpermute(y_SD, order_S, top_k)


# --- `route` fused with `permute` by the experts it chose
#
# T tokens, E experts, K choices, S = T·K rows, D columns.


def route_permute(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    x_TD: Tensor,
    slots_E: Tensor | None,
    softmax: bool,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logits_TE, bias_E or None, x_TD, slots_E or None -> gate_TK, expert_TK, rows_SD, gate_S, order_S, counts_E.

    The first two are those of `route`; the others those of `permute`, or with `slots_E` of `permute_placed`.
    """
    gate_TK, expert_TK = route(logits_TE, bias_E, softmax, groups, top_groups, top_k, normalize, scale)
    if slots_E is None:
        return gate_TK, expert_TK, *permute(x_TD, gate_TK, expert_TK, logits_TE.shape[1])
    return gate_TK, expert_TK, *permute_placed(x_TD, gate_TK, expert_TK, slots_E)


OPS = (
    *(replay_choices, table_choices, weigh_chosen, weigh_chosen_scores),
    *(route, route_dgrad, route_scores, route_scores_dgrad),
    *(sqrt_softplus, sqrt_softplus_dgrad, sigmoid_gate, sigmoid_gate_dgrad),
    slice_choices,
    slice_choices_dgrad,
    unpermute,
    unpermute_dgrad,
    permute,
    permute_placed,
    permute_dgrad,
    permute_gate_dgrad,
    permute_dgrad_add,
    permute_fp8,
    permute_placed_fp8,
    route_permute_fp8,
    unpermute_fp8_dgrad,
    unpermute_dgrad_quantise,
    unpermute_add,
    route_permute,
)
