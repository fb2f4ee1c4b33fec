"""Checks of the kernels of the router and its balance loss, in Triton's interpreter.

A choice of experts is either right or wrong. So choices are compared only for scores that rounding cannot reorder: any
two of them differ by more than their errors. Errors are in units of U = 2⁻²⁴, relative to the value, unless stated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import ops
from runtime.ops.routing import scores, top_indices
from tests.compiler.emit.kernels.interpreted import U, double, random, run, within

PER_ARGUMENT = 2  # units per |x| of an exp: the product of x and log2 e is rounded, and x or the constant before
OTHERS = 8  # units of the other operations of a score, such as exp, the sum and the division; a margin is included
CHECKED = ("route", "route_dgrad", "sequence_balance", "sequence_balance_dgrad")


def score_errors(logits_TE: Tensor, softmax: bool) -> Tensor:
    """logits_TE -> bound of the relative error of each score, in units of U. Omits that of a softmax's sum."""
    x_TE = logits_TE.double()
    if softmax:
        x_TE = x_TE - x_TE.amax(1, keepdim=True)
    return PER_ARGUMENT * x_TE.abs() + OTHERS


def assert_apart(logits_TE: Tensor, bias_E: Tensor | None, softmax: bool, groups: int, top_groups: int, k: int) -> None:
    """Assert that no rounding can change a choice of experts or groups.

    A softmax's sum is off by a unit per expert, equally for all experts of a token: it matters only beside a bias.
    """
    score_TE = scores(logits_TE.double(), softmax)
    error_TE = score_TE * score_errors(logits_TE, softmax) * U
    choice_TE = score_TE
    if bias_E is not None:
        choice_TE = score_TE + bias_E.double()
        error_TE = error_TE + U * (choice_TE.abs() + (logits_TE.shape[1] * score_TE if softmax else 0))
    if top_groups < groups:
        choice_TGM, error_TGM = (x_TE.unflatten(1, (groups, -1)) for x_TE in (choice_TE, error_TE))
        num = 1 if softmax or choice_TGM.shape[2] == 1 else 2
        values_TGN, index_TGN = choice_TGM.topk(num)
        best_TG = values_TGN.sum(-1)
        assert apart(best_TG, error_TGM.gather(2, index_TGN).sum(-1) + U * best_TG.abs(), top_groups)
        dropped_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, top_indices(best_TG, top_groups), False)
        choice_TE = choice_TGM.masked_fill(dropped_TG[:, :, None], -torch.inf).flatten(1)
    assert apart(choice_TE, error_TE, k)


def apart(x_TE: Tensor, error_TE: Tensor, num: int) -> bool:
    """Whether the `num` largest values of each row and the next one differ by more than their absolute errors."""
    values_TN, index_TN = x_TE.topk(min(num + 1, x_TE.shape[1]))
    error_TN = error_TE.gather(1, index_TN)
    return bool((values_TN[:, :-1] - values_TN[:, 1:] > error_TN[:, :-1] + error_TN[:, 1:]).all())


def route(
    tokens: int, experts: int, softmax: bool, groups: int, top_groups: int, k: int, normalize: bool, biased: bool
) -> None:
    logits_TE, bias_E = 2 * random(tokens, experts, seed=1), 0.1 * random(experts, seed=2) if biased else None
    options = (softmax, groups, top_groups, k, normalize, 2.5)
    assert_apart(logits_TE, bias_E, *options[:4])
    gate_TK, expert_TK = run("route", logits_TE, bias_E, *options)
    exact_TK, wanted_TK = ops.route(logits_TE.double(), None if bias_E is None else bias_E.double(), *options)
    assert torch.equal(expert_TK, wanted_TK)
    # A gate is a chosen score over the sum of chosen scores: errors of scores and of the softmax's sum count twice.
    scores_T1 = 2 * score_errors(logits_TE, softmax).gather(1, wanted_TK).sum(1, keepdim=True)
    softmax_sums = 2 * experts if softmax else 0
    sum_of_chosen, other_errors = k, 4  # the others: the division, the scale and a margin
    within(gate_TK, exact_TK, exact_TK * (scores_T1 + softmax_sums + sum_of_chosen + other_errors), 1)


def ties(softmax: bool, groups: int, top_groups: int) -> None:
    """Choices equal the reference for few different logits, so that many scores of experts and of groups are equal."""
    tokens, experts, k = 32, 24, 5
    values = torch.tensor([0.0, 1.0, 3.0])
    logits_TE = values[torch.randint(3, (tokens, experts), generator=torch.Generator().manual_seed(1))]
    logits_TE[0] = 1.0
    options = (softmax, groups, top_groups, k, True, 1.0)
    assert torch.equal(run("route", logits_TE, None, *options)[1], ops.route(logits_TE, None, *options)[1])


def nan_and_infinity(softmax: bool, groups: int, top_groups: int) -> None:
    """Choices equal the reference. NaN and infinity in a row leave the choices and gates of other rows unchanged."""
    tokens, experts, k = 6, 24, 5
    logits_TE = random(tokens, experts, seed=1)
    options = (softmax, groups, top_groups, k, True, 1.0)
    clean_TK, _ = run("route", logits_TE, None, *options)
    logits_TE[1] = torch.nan
    logits_TE[2, 7] = torch.nan
    logits_TE[3, 20:] = torch.inf
    logits_TE[4, :21] = -torch.inf
    gate_TK, expert_TK = run("route", logits_TE, None, *options)
    wanted_TK, chosen_TK = ops.route(logits_TE, None, *options)
    assert torch.equal(expert_TK, chosen_TK)
    assert torch.equal(gate_TK.isnan(), wanted_TK.isnan()) and gate_TK[1].isnan().all()
    assert torch.equal(gate_TK[[0, 5]], clean_TK[[0, 5]])


def route_dgrad(tokens: int, experts: int, softmax: bool, k: int, normalize: bool) -> None:
    """The bound is the sum of the magnitudes of all terms, times the relative error of a term."""
    logits_TE, dgate_TK = 2 * random(tokens, experts, seed=1), random(tokens, k, seed=2)
    expert_TK = top_indices(random(tokens, experts, seed=3), k)
    options = (expert_TK, softmax, normalize, 2.5)
    exact_TE = ops.route_dgrad(*double(dgate_TK, logits_TE), *options)
    score_TE = scores(logits_TE.double(), softmax)
    score_TK = score_TE.gather(1, expert_TK)
    grad_TK = 2.5 * dgate_TK.double().abs()
    if normalize:
        total_T1 = score_TK.sum(1, keepdim=True)
        grad_TK = (grad_TK + (grad_TK * score_TK).sum(1, keepdim=True) / total_T1) / total_T1
    magnitude_TE = torch.zeros_like(score_TE).scatter_(1, expert_TK, grad_TK * score_TK)
    if softmax:
        magnitude_TE += score_TE * (grad_TK * score_TK).sum(1, keepdim=True)
    worst_T1 = score_errors(logits_TE, softmax).amax(1, keepdim=True) + (experts if softmax else 0)
    # A term has up to four factors that are scores or sums of k of them.
    error_T1 = 4 * worst_T1 + 4 * k + OTHERS
    within(run("route_dgrad", dgate_TK, logits_TE, *options), exact_TE, magnitude_TE * error_T1, 1)


def balance(sequences: int, sequence: int, experts: int, k: int, softmax: bool) -> None:
    tokens = sequences * sequence
    logits_TE, dloss = 2 * random(tokens, experts, seed=1), random(seed=2)
    expert_TK = top_indices(random(tokens, experts, seed=3), k)
    options = (expert_TK, sequence, softmax)
    worst = float(score_errors(logits_TE, softmax).max()) if tokens else 0.0
    # A share is a score over the sum of all scores: the errors of two scores and of two sums, over experts and tokens.
    operations = int(2 * worst + experts + tokens + 2 * OTHERS)
    loss, exact = run("sequence_balance", logits_TE, *options), ops.sequence_balance(logits_TE.double(), *options)
    within(loss, exact, exact, operations)

    dlogits_TE = run("sequence_balance_dgrad", dloss, logits_TE, *options)
    exact_TE = ops.sequence_balance_dgrad(*double(dloss, logits_TE), *options)
    share_TE = scores(logits_TE.double(), softmax)
    share_TE = share_TE / share_TE.sum(1, keepdim=True)
    counts_BE = torch.stack([choices.flatten().bincount(minlength=experts) for choices in expert_TK.split(sequence)])
    dshare_TE = counts_BE.double().repeat_interleave(sequence, 0) * experts / (k * sequence**2) * float(dloss.abs())
    magnitude_TE = share_TE * (dshare_TE + (share_TE * dshare_TE).sum(1, keepdim=True))
    within(dlogits_TE, exact_TE, magnitude_TE, operations)
