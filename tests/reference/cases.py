"""Small models and data for the tests of the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.reference.config import Balance, Config, Dense, Gqa, HeadDim, Mla, Moe, Mtp, Phase, Rope
from tests.reference.model import Reference, Router

EXACT = 1e-12  # of float64, over the few hundred roundings of a small model


def moe(
    experts: int = 8,
    shared: int = 1,
    top_k: int = 3,
    groups: int = 4,
    top_groups: int = 2,
    normalize: bool = True,
    scale: float = 2.5,
    sequence_loss: float = 0.01,
    bias_rate: tuple[Phase, ...] | None = (Phase(0.01),),
    score: str = "sigmoid",
) -> Moe:
    balance = Balance(bias_rate, sequence_loss)
    return Moe(experts, shared, top_k, 12, groups, top_groups, score, normalize, scale, balance)


def gqa(
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 4,
    qk_norm: str | None = None,
    theta: float = 100.0,
    **more: Any,
) -> Gqa:
    return Gqa(heads, kv_heads, head_dim, qk_norm, **{"rope": Rope(theta)} | more)


def config(
    vocab: int = 37,
    hidden: int = 24,
    init_std: float = 0.15,
    norm_eps: float = 1e-6,
    heads: int = 3,
    query_rank: int | None = 10,
    theta: float = 10_000.0,
    layers: tuple[Dense | Moe, ...] = (Dense(20), moe(), moe()),
    mtp: Mtp | None = Mtp(1, (Phase(0.3),)),  # noqa: B008 (frozen)
    sequence: int = 12,
    attention: Gqa | None = None,
    rope: Rope | None = None,
) -> Config:
    """A config with latent attention of the given sizes, or with `attention`."""
    latent = Mla(heads, query_rank, kv_rank=8, head_dim=HeadDim(6, 4, 5), rope=rope or Rope(theta))
    attention = attention or latent
    return Config(vocab, hidden, init_std, norm_eps, attention, layers, mtp, sequence)


@torch.no_grad()
def trained_like(config: Config, seed: int = 0, dtype: torch.dtype = torch.float64) -> Reference:
    """A model whose norms are not 1 and whose router biases are not 0, so that forgetting one shows.

    Router weights are four times the usual size: tokens then differ in their choice, and every expert gets some.
    """
    model = Reference(config, seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    for name, tensor in model.state_dict().items():
        if name.endswith("router.table"):
            router = model.get_submodule(name.removesuffix(".table"))
            assert isinstance(router, Router)
            drawn = torch.rand(len(tensor), router.moe.experts, generator=generator)
            tensor.copy_(drawn.argsort(dim=1)[:, : router.moe.top_k])
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if name.endswith(("norm", "_bias")):
            tensor += 0.2 * noise
        if name.endswith("router.bias"):
            tensor += 0.1 * noise
        if name.endswith("router.weight"):
            tensor *= 4
    return model.to(dtype)


def samples(config: Config, batch: int = 2, seed: int = 0) -> Tensor:
    """Random samples z_BZ [batch, sequence + 2]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab, (batch, config.sequence + 2), generator=generator)


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def routing_of(moe_config: Moe, seed: int = 0) -> tuple[Reference, Tensor]:
    """A model of one MoE layer, and a random residual stream [2, 12, 24] to route."""
    model = trained_like(config(layers=(moe_config,), mtp=None), seed)
    return model, noise(2, 12, 24, seed=seed)


def close(a: Tensor | float, b: Tensor | float, tolerance: float = EXACT) -> bool:
    """Whether no element differs by more than `tolerance`."""
    difference = torch.as_tensor(a, dtype=torch.float64) - torch.as_tensor(b, dtype=torch.float64)
    return bool(difference.abs().max() <= tolerance)
