"""Edge cases of the policy loss: equal sides of the minimum, void tokens, the bits of logp, blocks of rows."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from runtime.ops import OPS, cross_entropy, policy_loss, policy_loss_dgrad
from tests.runtime.ops import cases
from tests.runtime.ops.cases import Args, Source, widened

LOW, HIGH = 0.2, 0.28
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def arguments(dtype: torch.dtype, T: int = 9, V: int = 6, seed: int = 0, kl: float = 0.04) -> Args:
    return widened("policy_loss", cases.policy_loss(Source(dtype, seed), T, V, kl))


def gradient(args: Args) -> Tensor:
    """dlogits for dloss = 1."""
    loss, _, lse_T = policy_loss(*args)
    return policy_loss_dgrad(torch.ones_like(loss), *args, lse_T)


@DTYPES
@pytest.mark.parametrize("torch_alone", [False, True])
def test_logp_is_bit_identical_to_cross_entropy_beside_any_rows(
    dtype: torch.dtype, torch_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch_alone:
        monkeypatch.setattr(import_module("runtime.ops.cross_entropy"), "runs_natively", lambda *_: False)
    args = arguments(dtype, T=300, V=2000)
    logits_TV, targets_T, *options = args
    logp_T = policy_loss(*args)[1]
    losses = [cross_entropy(logits_TV[t : t + 1], targets_T[t : t + 1])[0] for t in range(300)]
    assert torch.equal(-logp_T, torch.stack(losses))
    chosen = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:77]
    fewer = (each_T[chosen] if isinstance(each_T, Tensor) else each_T for each_T in options)
    assert torch.equal(policy_loss(logits_TV[chosen], targets_T[chosen], *fewer)[1], logp_T[chosen])


@DTYPES
def test_void_tokens_have_no_effect(dtype: torch.dtype) -> None:
    logits_TV, targets_T, *per_token, reference_T, low, high, kl, corrected = arguments(dtype)
    wild = [each_T.masked_fill(targets_T < 0, torch.nan) for each_T in (*per_token, reference_T)]
    plain, changed = (
        (logits_TV, targets_T, *four, low, high, kl, corrected) for four in ((*per_token, reference_T), wild)
    )
    for result, expected in zip(policy_loss(*plain), policy_loss(*changed), strict=True):
        assert torch.equal(result, expected)
    assert torch.equal(gradient(plain), gradient(changed))
    assert not gradient(plain)[targets_T < 0].any() and not policy_loss(*plain)[1][targets_T < 0].any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_clipped"),
    [
        (1.0, 2.0, False),
        (1.0, -2.0, False),
        (1.27, 2.0, False),
        (1.29, 2.0, True),
        (1.29, -2.0, False),
        (0.81, -2.0, False),
        (0.79, -2.0, True),
        (0.79, 2.0, False),
        (5.0, 0.0, False),
    ],
)
def test_the_gradient_stops_where_the_clipped_side_is_smaller(ratio: float, advantage: float, is_clipped: bool) -> None:
    unit = torch.ones(1, dtype=torch.float64)
    logits_TV = Source(torch.float64, 3).normal(1, 5)
    target = torch.tensor([2])
    logp_T = -cross_entropy(logits_TV, target)[0][None]
    old_T = logp_T - torch.tensor(ratio, dtype=torch.float64).log()
    args = (logits_TV, target, old_T, advantage * unit, 3 * unit, None, LOW, HIGH, 0.0, True)
    bound = 1 + HIGH if advantage > 0 else 1 - LOW
    expected = -3 * advantage * (bound if is_clipped else ratio)
    assert policy_loss(*args)[0].item() == pytest.approx(expected, rel=1e-14)
    onehot_TV = torch.nn.functional.one_hot(target, 5)
    slope = 0.0 if is_clipped else -3 * advantage * ratio
    torch.testing.assert_close(gradient(args), slope * (onehot_TV - logits_TV.softmax(1)), rtol=1e-13, atol=1e-14)


def test_the_ratio_is_one_for_the_policy_that_sampled() -> None:
    logits_TV, targets_T, _, advantage_T, weight_T, *_ = arguments(torch.float32, T=64, V=500)
    old_T = policy_loss(logits_TV, targets_T, advantage_T, advantage_T, weight_T, None, LOW, HIGH, 0.0, True)[1]
    loss, logp_T, _ = policy_loss(logits_TV, targets_T, old_T, advantage_T, weight_T, old_T, LOW, HIGH, 0.5, True)
    valid = targets_T >= 0
    assert torch.equal(logp_T, old_T)
    assert loss == -(advantage_T.double() * weight_T)[valid].sum().float()


def test_blocks_of_rows_of_bf16_give_the_gradient_of_fp32() -> None:
    args = arguments(torch.bfloat16, T=300, V=2000)
    exact = gradient((args[0].float(), *args[1:]))
    torch.testing.assert_close(gradient(args).float(), exact, rtol=2**-8, atol=1e-9)


def test_a_target_outside_the_vocabulary_makes_the_loss_nan() -> None:
    logits_TV, targets_T, *options = arguments(torch.float32)
    targets_T = torch.where(torch.arange(len(targets_T)) == 4, logits_TV.shape[1], targets_T)
    loss, logp_T, _ = OPS["policy_loss"](logits_TV, targets_T, *options)
    assert loss.isnan() and logp_T.isnan().nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("corrected", [True, False])
def test_the_mean_gradient_over_all_words_equals_that_of_a_divergence(corrected: bool) -> None:
    """Each of five words occurs once, weighted by its probability under the policy; all advantages are 0."""
    source = Source(torch.float64, 11)
    policy_V, reference_V = (source.normal(5).requires_grad_(trained) for trained in (True, False))
    logp_V, away_V = policy_V.log_softmax(0), reference_V.log_softmax(0)
    divergence = (logp_V.exp() * (logp_V - away_V)) if corrected else (away_V.exp() * (away_V - logp_V))
    divergence.sum().backward()
    with torch.no_grad():
        sampled = (torch.arange(5), logp_V, torch.zeros(5), logp_V.exp(), away_V, LOW, HIGH, 1.0, corrected)
        loss, *_ = policy_loss(policy_V.expand(5, 5).contiguous(), *sampled)
        found_VV = gradient((policy_V.expand(5, 5).contiguous(), *sampled))
    torch.testing.assert_close(found_VV.sum(0), policy_V.grad, rtol=1e-12, atol=1e-14)
    forward = (logp_V.exp() * (logp_V - away_V)).sum()
    torch.testing.assert_close(loss, forward.detach(), rtol=1e-12, atol=1e-14)
