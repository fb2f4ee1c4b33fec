"""The hand-written recipe against torch's own optimizer and closed forms."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from tests.reference.cases import config, moe, samples, trained_like
from tests.reference.config import Dense, Mtp, Phase
from tests.reference.training import AdamW, Recipe, balance_, clip_, train_steps


def test_adamw_against_torch() -> None:
    """Five steps on given gradients with changing rates; norms are in a group without decay."""
    model = trained_like(config())
    ours = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    theirs = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    recipe = Recipe(rates=(), beta1=0.8, beta2=0.9, eps=1e-4, weight_decay=0.3)
    optimizer = AdamW(ours, recipe)
    groups = [
        {"params": [p for name, p in theirs.items() if "norm" not in name], "weight_decay": 0.3},
        {"params": [p for name, p in theirs.items() if "norm" in name], "weight_decay": 0.0},
    ]
    torch_optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-4)
    generator = torch.Generator().manual_seed(0)
    for rate in (0.1, 0.05, 0.2, 0.0, 0.1):
        gradients = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in ours.items()}
        optimizer.step_(gradients, rate)
        for name, p in theirs.items():
            p.grad = gradients[name]
        for group in torch_optimizer.param_groups:
            group["lr"] = rate
        torch_optimizer.step()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-12, atol=1e-13) for name in ours)
    assert not any(torch.allclose(ours[name], parameter) for name, parameter in model.named_parameters())


def test_the_first_step_is_the_rate_against_the_sign() -> None:
    p, g = torch.tensor([1.0, -2.0, 3.0]).double(), torch.tensor([0.5, -4.0, 0.0]).double()
    AdamW({"head": p}, Recipe(rates=(), eps=1e-12, weight_decay=0.0)).step_({"head": g}, rate=0.01)
    assert torch.allclose(p, torch.tensor([0.99, -1.99, 3.0]).double(), rtol=1e-10)


def test_decay_is_decoupled_and_spares_norms() -> None:
    parameters = {name: torch.ones(3).double() for name in ("head", "layers.0.attention.q_norm", "mtp.0.final_norm")}
    zeros = {name: torch.zeros(3).double() for name in parameters}
    AdamW(parameters, Recipe(rates=(), weight_decay=0.1)).step_(zeros, rate=0.5)
    assert [p[0].item() for p in parameters.values()] == [1 - 0.5 * 0.1, 1.0, 1.0]


def test_clipping_is_exact_and_leaves_small_norms_alone() -> None:
    gradients = {"a": torch.tensor([3.0, 0.0]).double(), "b": torch.tensor([[4.0]]).double()}
    assert clip_(gradients, 10.0) == 5.0 and gradients["a"][0] == 3.0
    assert clip_(gradients, None) == 5.0 and gradients["a"][0] == 3.0
    assert clip_(gradients, 1.0) == 5.0
    assert math.isclose(gradients["a"][0].item(), 3 / 5, rel_tol=1e-15)
    assert math.isclose(clip_(gradients, 1.0), 1.0, rel_tol=1e-15)


def test_biases_move_against_the_load_by_the_rate() -> None:
    phases = (Phase(0.5, 100), Phase(0.25))
    model = trained_like(config(layers=(Dense(20), moe(bias_rate=phases), moe(bias_rate=phases))))
    loads = {"layers.2": torch.tensor([9, 0, 3, 3, 3, 3, 2, 1]), "mtp.0": torch.tensor([0, 0, 0, 0, 8, 8, 8, 0])}
    for tokens, rate in ((99, 0.5), (100, 0.25)):
        before = {name: bias.clone() for name, bias in model.named_buffers()}
        balance_(model, loads, tokens)
        moved = {
            name: ((bias - before[name]) / rate).round(decimals=9).tolist() for name, bias in model.named_buffers()
        }
        assert moved == {
            "layers.1.ffn.router.bias": [0.0] * 8,
            "layers.2.ffn.router.bias": [-1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0],
            "mtp.0.ffn.router.bias": [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0],
        }


def test_balancing_evens_the_load() -> None:
    """Only the biases move at a rate of zero: the load of every token's favourite comes down to near the mean."""
    model = trained_like(config(layers=(moe(groups=1, top_groups=1, bias_rate=(Phase(0.04),)),), mtp=None, sequence=40))
    model.layers[0].ffn.router.bias[3] = 1.5
    z_BZ = samples(model.config, batch=4)
    steps = train_steps(model, [z_BZ] * 40, Recipe(rates=(0.0,) * 40))
    num_tokens = 4 * 40
    assert steps[0].loads["layers.0"][3] == num_tokens
    assert max(steps[-1].loads["layers.0"]) < 1.25 * (num_tokens * 3 / 8)


def test_training_fits_a_batch() -> None:
    model = trained_like(config())
    z_BZ = samples(config())
    steps = train_steps(model, [z_BZ] * 60, Recipe(rates=(0.01,) * 60))
    assert steps[-1].main < 0.1 * steps[0].main and steps[-1].mtp < 0.1 * steps[0].mtp


def test_a_step_is_the_composition_of_its_parts() -> None:
    model, by_hand = trained_like(config()), trained_like(config())
    recipe = Recipe(rates=(0.01, 0.02), clip=0.1)
    batches = [samples(config(), batch, seed=batch) for batch in (2, 3)]
    steps = train_steps(model, batches, recipe)

    parameters = dict(by_hand.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for name, p in parameters.items() if "norm" not in name], "weight_decay": 0.1},
            {"params": [p for name, p in parameters.items() if "norm" in name], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for z_BZ, rate, step in zip(batches, recipe.rates, steps, strict=True):
        optimizer.zero_grad()
        losses = by_hand.losses(z_BZ)
        (losses.main + 0.3 * losses.mtp + losses.sequence).backward()
        norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm()
        assert norm > 0.1, "the case is one that clips"
        for p in parameters.values():
            p.grad *= 0.1 / norm
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for block, load_E in losses.loads.items():
            sign_E = torch.sign(load_E.sum().double() / 8 - load_E)
            by_hand.get_buffer(f"{block}.ffn.router.bias").add_(sign_E, alpha=0.01)
        assert math.isclose(step.main, losses.main.item(), rel_tol=1e-12)
        assert math.isclose(step.mtp, losses.mtp.item(), rel_tol=1e-12)
        assert math.isclose(step.sequence, losses.sequence.item(), rel_tol=1e-12)
        assert math.isclose(step.gradient_norm, norm.item(), rel_tol=1e-12)
        assert step.loads == {block: load_E.tolist() for block, load_E in losses.loads.items()}
    for name, tensor in by_hand.state_dict().items():
        assert torch.allclose(tensor, model.state_dict()[name], rtol=1e-10, atol=1e-12), name


def test_the_mtp_weight_follows_the_tokens_trained_on() -> None:
    """24 tokens per step and weight 1 until 25 tokens: steps that begin after 0 and 24 tokens train MTP, later do not.

    Norms are not decayed, and with β1 = β2 = 0 there is no momentum: MTP's final norm moves just with its loss.
    """
    weighted = replace(config(), mtp=Mtp(1, (Phase(1.0, 25), Phase(0.0))))
    final_norms = []
    for num_steps in range(5):
        model = trained_like(weighted)
        recipe = Recipe(rates=(0.01,) * num_steps, beta1=0.0, beta2=0.0)
        train_steps(model, [samples(weighted)] * num_steps, recipe)
        final_norms.append(model.mtp[0].final_norm)
    moved = [not torch.equal(before, after) for before, after in itertools.pairwise(final_norms)]
    assert moved == [True, True, False, False]


def test_from_plan_reads_the_dump_of_an_optimizer() -> None:
    dump = {"kind": "adamw", "beta1": 0.8, "beta2": 0.9, "eps": 1e-7, "weight_decay": 0.2, "clip": None}
    assert Recipe.from_plan(dump, [0.1, 0.2]) == Recipe((0.1, 0.2), 0.8, 0.9, 1e-7, 0.2, None)
