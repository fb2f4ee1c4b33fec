"""Choosing experts, and rows of tokens to the order of their experts and back, in BF16 and in FP8."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import embedding_bag

from runtime.ops.quantise import quantise

# --- Choosing experts: scores, groups of experts, and a bias that steers the choice alone
#
# With sigmoid scores as DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2; with softmax scores as
# "DeepSeek-V2", 2024, section 2.1.3, and its published code. T tokens, E experts, K choices.

THRESHOLD = 40.0  # softplus(x) is x to the bit of FP64 above 37
TINY = 1e-20  # V2 and V3 add it to the sum of the chosen scores
WHOLE = 64  # elements that torch computes together, at most: two vectors of 512 bits of BF16


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

    The scores are the softmax over all experts, or the sigmoid of each. Experts are chosen by score + bias among the
    `top_groups` groups with the largest group scores: the best expert's (softmax), the sum of the two best (sigmoid;
    of one, where the group has one). Of equals the first is better, and NaN is better than all numbers. The bias is
    finite. The gate weight is the score without bias, divided by the sum of the chosen if `normalize`, times `scale`.
    """
    counted = 1 if softmax else 2
    return _chosen(scores(logits_TE, softmax), bias_E, counted, groups, top_groups, top_k, normalize, scale)


def _chosen(
    score_TE: Tensor,
    bias_E: Tensor | None,
    counted: int,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """gate_TK, expert_TK of scores. `counted`: the best experts whose sum is the score of their group."""
    choice_TE = score_TE if bias_E is None else score_TE + bias_E
    expert_TK = best(_among_best_groups(choice_TE, groups, top_groups, counted), top_k)
    return weigh_chosen_scores(score_TE, expert_TK, normalize, scale), expert_TK


def scores(logits_TE: Tensor, softmax: bool) -> Tensor:
    """logits_TE -> score_TE, in their dtype."""
    return torch.softmax(logits_TE, dim=-1) if softmax else sigmoid(logits_TE)


def by_element(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of each element, of the same bits wherever it is. torch computes what is left behind the last whole
    vectors of a tensor in another way, so here nothing is left."""
    left = -x.numel() % WHOLE
    if not left or not x.is_cpu:
        return function(x)
    return function(functional.pad(x.reshape(-1), (0, left)))[: x.numel()].view(x.shape)


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid of each element, by `by_element`."""
    return by_element(torch.sigmoid, x)


def best(x_TE: Tensor, num: int) -> Tensor:
    """x_TE -> index_TN (int64) of the `num` largest of each row, in descending order, and of equals in ascending order.

    `topk` takes equals in any order, and sorting stably takes 5 times as long: 8.4 and 36 ms, this 6.5 (T 4096, E 256,
    num 8, FP32, one core).
    """
    left_TE, found = x_TE.clone(), []
    for _ in range(num):
        found.append(left_TE.max(dim=-1, keepdim=True).indices)  # the first of equals
        left_TE.scatter_(1, found[-1], -torch.inf)
    return torch.cat(found, dim=1)


def _among_best_groups(choice_TE: Tensor, groups: int, top_groups: int, num_best: int) -> Tensor:
    """choice_TE with −inf in all but the `top_groups` of its `groups` whose `num_best` best have the largest sum."""
    if top_groups == groups:
        return choice_TE
    choice_TGM = choice_TE.unflatten(1, (groups, -1))
    best_TG = choice_TGM.topk(min(num_best, choice_TGM.shape[2]), dim=-1).values.sum(dim=-1)
    dropped_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, best(best_TG, top_groups), False)
    return choice_TGM.masked_fill(dropped_TG[:, :, None], -torch.inf).flatten(1)


def route_dgrad(
    dgate_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, softmax: bool, normalize: bool, scale: float
) -> Tensor:
    """dgate_TK, logits_TE, expert_TK -> dlogits_TE. The choice has no gradient."""
    score_TE = scores(logits_TE, softmax)
    score_TK = score_TE.gather(1, expert_TK)
    dlogits_TK = _dscore(dgate_TK, score_TK, normalize, scale) * score_TK
    if not softmax:
        dlogits_TK *= 1 - score_TK
        return torch.zeros_like(logits_TE).scatter_(1, expert_TK, dlogits_TK)  # the K experts of a token are distinct
    dlogits_TE = score_TE * -dlogits_TK.sum(dim=-1, keepdim=True)
    return dlogits_TE.scatter_add_(1, expert_TK, dlogits_TK)


def _dscore(dgate_TK: Tensor, score_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    """dgate_TK and the chosen scores -> their gradient dscore_TK."""
    dscore_TK = dgate_TK * scale
    if not normalize:
        return dscore_TK
    total_T1 = score_TK.sum(dim=-1, keepdim=True) + TINY
    mean_T1 = (dscore_TK * score_TK).sum(dim=-1, keepdim=True) / total_T1
    return (dscore_TK - mean_T1) / total_T1


# ---------------------------------------------------------------- scores of another kind
def sqrt_softplus(logits_TE: Tensor) -> Tensor:
    """logits_TE -> score_TE = √log(1 + e^logit), the scores of DeepSeek-V4."""
    return by_element(lambda x: functional.softplus(x, threshold=THRESHOLD).sqrt_(), logits_TE)


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
    """score_TE, bias_E or None -> gate_TK, expert_TK (int64): `route` of scores that are given, as with sigmoid."""
    return _chosen(score_TE, bias_E, 2, groups, top_groups, top_k, normalize, scale)


def route_scores_dgrad(dgate_TK: Tensor, score_TE: Tensor, expert_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    """dgate_TK, score_TE, expert_TK -> dscore_TE."""
    dscore_TK = _dscore(dgate_TK, score_TE.gather(1, expert_TK), normalize, scale)
    return torch.zeros_like(score_TE).scatter_(1, expert_TK, dscore_TK)


# ---------------------------------------------------------------- experts that are chosen already
def replay_choices(expert_TK: Tensor, given_TK: Tensor) -> Tensor:
    """expert_TK, given_TK (int64) -> expert_TK, the given ones where these are not below 0."""
    return torch.where(given_TK >= 0, given_TK, expert_TK)


def table_choices(tokens_T: Tensor, table_VK: Tensor) -> Tensor:
    """tokens_T (int64), table_VK (int32) -> expert_TK (int64), the rows of the table by token."""
    return table_VK.index_select(0, tokens_T).long()


def weigh_chosen(logits_TE: Tensor, expert_TK: Tensor, softmax: bool, normalize: bool, scale: float) -> Tensor:
    """logits_TE, expert_TK -> gate_TK, the weights that `route` gives experts that are chosen already."""
    return weigh_chosen_scores(scores(logits_TE, softmax), expert_TK, normalize, scale)


def weigh_chosen_scores(score_TE: Tensor, expert_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    """score_TE, expert_TK -> gate_TK, likewise of scores that are given."""
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


# --- Choices of experts whose width is split over ranks, as choices of their slices. T tokens, K choices, E experts
#
# A slice gets the rows of its expert, with their gate weight: what the slices of an expert give sums to what it gives.


def slice_choices(
    gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor, slices: int, apart: int
) -> tuple[Tensor, Tensor]:
    """gate_TK, expert_TK, slots_E -> gate and place (int64) of every slice, [T, K·slices], those of a choice adjacent.

    Slice j of expert e is in place slots[e] + j·apart of the layer.
    """
    places_TK = slots_E.index_select(0, expert_TK.flatten()).view_as(expert_TK)
    steps_J = torch.arange(slices, device=slots_E.device) * apart
    return gate_TK.repeat_interleave(slices, dim=1), (places_TK[:, :, None] + steps_J).flatten(1)


def slice_choices_dgrad(dslice_gate_TL: Tensor, slices: int) -> Tensor:
    """dslice_gate [T, K·slices] -> dgate_TK, summed over the slices of a choice."""
    return dslice_gate_TL.unflatten(1, (-1, slices)).sum(2)


# --- Expert rows back to their tokens, summed over each token's choices. S = T·K rows, T tokens, K choices, D columns
#
# `order_S` is that of `permute`: row j holds choice order[j] = t·K + k.


def places(order_S: Tensor, top_k: int) -> Tensor:
    """order_S -> place_TK: the row that holds choice k of token t, the inverse of `order`."""
    rows_S = torch.arange(order_S.shape[0], device=order_S.device)
    return torch.empty_like(order_S).scatter_(0, order_S, rows_S).view(-1, top_k)


def unpermute(y_SD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """y_SD, order_S -> y_TD = Σ_k of each token's rows, added in the order of k: deterministic."""
    # Gathering and adding in one pass: 0.17 ms; index_select then sum 0.70 (T 2048, K 4, D 256, FP32, one core).
    return embedding_bag(places(order_S, top_k), y_SD, mode="sum")


def unpermute_dgrad(dout_TD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """dout_TD, order_S -> dy_SD: every row gets its token's gradient."""
    return dout_TD.index_select(0, order_S // top_k)


# --- A row for each choice of each token, sorted stably by expert
#
# T tokens, K choices, S = T·K rows, E experts, D columns.


def permute(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_TD, gate_TK, expert_TK (int64) -> rows_SD, gate_S, order_S (int64), counts_E (int64).

    Row j holds choice order[j] = t·K + k: token t's row and its gate weight; counts are the rows of each expert.
    """
    return _sorted(x_TD, gate_TK, expert_TK.flatten(), num_experts)


def permute_placed(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`permute` for experts that are placed: expert e is in place slots[e] of the layer (int64, a permutation). Rows
    are in the order of the places, and counts are those of each place.
    """
    return _sorted(x_TD, gate_TK, slots_E.index_select(0, expert_TK.flatten()), slots_E.shape[0])


def _sorted(x_TD: Tensor, gate_TK: Tensor, place_S: Tensor, num_places: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order_S = torch.argsort(place_S, stable=True)
    rows_SD = x_TD.index_select(0, order_S // gate_TK.shape[1])
    gate_S = gate_TK.flatten().index_select(0, order_S)
    return rows_SD, gate_S, order_S, torch.bincount(place_S, minlength=num_places)


def permute_dgrad(drows_SD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """drows_SD, order_S -> dx_TD, summed over the choices of a token."""
    return unpermute(drows_SD, order_S, top_k)


def permute_gate_dgrad(drow_gate_S: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """drow_gate_S, order_S -> dgate_TK: an op of its own, for the router's gradient needs it before anyone needs dx."""
    return torch.empty_like(drow_gate_S).scatter_(0, order_S, drow_gate_S).view(-1, top_k)


def permute_dgrad_add(drows_SD: Tensor, order_S: Tensor, top_k: int, add_TD: Tensor, more_TD: Tensor | None) -> Tensor:
    """drows_SD, order_S, add_TD, more_TD or None -> (add + permute_dgrad(drows)) + more, each result rounded: the rows'
    gradient and the others of what was permuted, in the order in which they are added without this op.
    """
    sum_TD = torch.add(add_TD, permute_dgrad(drows_SD, order_S, top_k))
    return sum_TD if more_TD is None else torch.add(sum_TD, more_TD)


# --- Moving rows of eight bits, with their scales. T tokens, K choices, S = T·K rows, E experts, D columns, B tiles
#
# Each is the op without `fp8` in its name, of the data and of the scales, which go where their rows go. The scales that
# are returned lie column by column, as those that come in do (runtime/ops/quantise.py).


def permute_fp8(
    x_TD: Tensor, scales_TB: Tensor, gate_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x_TD, scales_TB, gate_TK, expert_TK -> rows_SD, scales_SB, gate_S, order_S, counts_E."""
    rows_SD, *rest = permute(x_TD.view(torch.uint8), gate_TK, expert_TK, num_experts)
    return _with_scales(rows_SD.view(x_TD.dtype), scales_TB, gate_TK.shape[1], *rest)


def permute_placed_fp8(
    x_TD: Tensor, scales_TB: Tensor, gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`permute_fp8` for experts that are placed: expert e is in place slots[e]."""
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
    """dy_TD, order_S -> dy_SD, scales_SB: every row of a token is its gradient, quantised once."""
    return unpermute_fp8_dgrad(*quantise(dy_TD, pow2), order_S, top_k)


def _with_scales(
    rows_SD: Tensor, scales_TB: Tensor, top_k: int, gate_S: Tensor, order_S: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return rows_SD, _scales(scales_TB, order_S, top_k), gate_S, order_S, counts_E


def _scales(scales_TB: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """scales_TB, order_S -> scales_SB: those of each row's token."""
    return scales_TB.t().index_select(1, order_S // top_k).t()


# --- The join of a layer in one op: the residual, the shared experts, and the routed experts' rows summed by token
#
# S = T·K rows, T tokens, K choices, D columns.


def unpermute_add(h_TD: Tensor, shared_TD: Tensor | None, y_SD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """h_TD, shared_TD or None, y_SD, order_S -> (h + shared) + unpermute(y), each of the three results rounded."""
    sum_TD = h_TD if shared_TD is None else h_TD + shared_TD
    return sum_TD + unpermute(y_SD, order_S, top_k)


# --- The router and what follows it in one op: `route`, then `permute` of the rows by what it chose
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

    The first two as of `route`; the others as of `permute`, or with `slots_E` of `permute_placed`.
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
