"""The gradients of the reference: all there, right, and of the losses they should come from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.reference.cases import close, config, moe, routing_of, samples, trained_like
from tests.reference.losses import Losses
from tests.reference.model import Reference


def gradients(model: Reference, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return model.logical_gradients()


@pytest.mark.parametrize("query_rank", [10, None])
def test_every_parameter_has_a_gradient(query_rank: int | None) -> None:
    """160 tokens, so that every expert has some."""
    long = config(query_rank=query_rank, sequence=40)
    model = trained_like(long)
    losses = model.losses(samples(long, batch=4))
    assert all(load_E.min() > 0 for load_E in losses.loads.values())
    losses.total(0.3).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_without_weight_mtp_has_no_part() -> None:
    model, z_BZ = trained_like(config()), samples(config())
    losses = model.losses(z_BZ)
    with_weight_0 = gradients(model, losses.total(0.0))
    assert not any(gradient.any() for name, gradient in with_weight_0.items() if name.startswith("mtp"))

    alone = Reference(replace(config(), mtp=None))
    alone.load_logical({name: t for name, t in model.logical_parameters().items() if not name.startswith("mtp")})
    main_losses = alone.losses(z_BZ)
    assert close(main_losses.main, losses.main, 0.0) and close(main_losses.sequence, losses.sequence, 0.0)
    assert close(main_losses.mtp, 0.0, 0.0)
    for name, gradient in gradients(alone, main_losses.total(0.3)).items():
        assert close(gradient, with_weight_0[name])


def test_mtp_trains_the_main_model_too() -> None:
    """The shared embedding and head, the main layers, and the final norm, since MTP takes the normed hidden state."""
    model, z_BZ = trained_like(config()), samples(config())
    gradient = gradients(model, model.losses(z_BZ).mtp)
    assert all(gradient[name].any() for name in gradient if "experts" not in name)


def test_sequence_loss_reaches_scores_but_not_the_count() -> None:
    """The gradient of the sequence loss for a router's weight equals that of Σ f_i P_i with constant f."""
    model, x_BSD = routing_of(moe())
    router = model.layers[0].ffn.router
    routing = router(x_BSD)
    routing.balance_loss.backward()
    count_BE = torch.stack([chosen.flatten().bincount(minlength=8) for chosen in routing.chosen_BSK])
    f_BE = count_BE.double() * 8 / (3 * 12)
    score_BSE = routing.score_BSE.detach()
    total_BS1 = score_BSE.sum(-1, keepdim=True)
    # d(Σ f_i s_i / Σ s) / d s_j = (f_j − Σ f_i p_i) / Σ s, then through the sigmoid.
    mean_BS1 = (f_BE[:, None] * score_BSE / total_BS1).sum(-1, keepdim=True)
    d_logit_BSE = (f_BE[:, None] - mean_BS1) / total_BS1 * score_BSE * (1 - score_BSE) / (2 * 12)
    assert close(router.weight.grad, torch.einsum("bse,bsd->ed", d_logit_BSE, x_BSD))


@pytest.mark.parametrize("seed", range(3))
def test_gradients_against_finite_differences(seed: int) -> None:
    """Along a random direction of all parameters; a step of 1e-5 leaves the routing as it is."""
    model, z_BZ = trained_like(config(), seed), samples(config(), seed=seed)
    losses = model.losses(z_BZ)
    gradient = gradients(model, losses.total(0.3))
    generator = torch.Generator().manual_seed(seed)
    direction = {n: torch.randn(g.shape, generator=generator, dtype=g.dtype) for n, g in gradient.items()}
    start = model.logical_parameters()

    def at(step: float) -> Losses:
        model.load_logical({name: tensor + step * direction.get(name, 0.0) for name, tensor in start.items()})
        return model.losses(z_BZ)

    plus, minus = at(1e-5), at(-1e-5)
    for block, load_E in losses.loads.items():
        assert load_E.equal(plus.loads[block]) and load_E.equal(minus.loads[block])
    slope = (plus.total(0.3) - minus.total(0.3)).item() / 2e-5
    expected = sum((gradient[name] * direction[name]).sum().item() for name in gradient)
    assert abs(expected) > 0.01 and abs(slope - expected) < 1e-6 * abs(expected) + 1e-7


def test_gradient_of_a_batch_is_the_mean_over_its_sequences() -> None:
    model, z_BZ = trained_like(config()), samples(config(), batch=4)
    batch_gradients = gradients(model, model.losses(z_BZ).total(0.3))
    parts = [gradients(model, model.losses(z_BZ[i : i + 1]).total(0.3)) for i in range(4)]
    assert all(close(gradient, sum(part[name] for part in parts) / 4) for name, gradient in batch_gradients.items())


def test_float32_and_float64_agree() -> None:
    double, single = trained_like(config()), trained_like(config(), dtype=torch.float32)
    double.load_logical(single.logical_parameters())
    z_BZ = samples(config())
    a, b = double.losses(z_BZ).total(0.3), single.losses(z_BZ).total(0.3)
    assert a.dtype == torch.float64 and b.dtype == torch.float32
    assert close(a, b, 1e-5) and not close(a, b, 1e-10)
