"""The loss of indexers beside models of `transformers`, whose class has none: by torch's operations, for autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def indexer_losses(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """The loss of each layer of what the model computes meanwhile, the mean over the tokens: none without indexers."""
    found: list[Tensor] = []

    def hook(attention: nn.Module, args: Any, given: dict[str, Any], result: tuple[Tensor, Tensor]) -> None:
        cos, sin = given["position_embeddings"]
        found.append(_loss(attention, given["hidden_states"].detach(), cos, sin, result[1].detach()))

    layers = [each for each in model.modules() if hasattr(each, "indexer")]
    hooks = [each.register_forward_hook(hook, with_kwargs=True) for each in layers]
    yield found
    for each in hooks:
        each.remove()


def _loss(attention: Any, x_BSD: Tensor, cos: Tensor, sin: Tensor, weights_BHSS: Tensor) -> Tensor:
    """Σ p·log(p / softmax(I)) over the keys that attention gives a weight, which are those it has chosen."""
    indexer, rope = attention.indexer, attention.qk_rope_head_dim
    latent = attention.q_a_layernorm(attention.q_a_proj(x_BSD)).detach()
    q_BSHC = indexer.wq_b(latent).unflatten(2, (indexer.n_heads, indexer.head_dim))
    k_BSC = nn.functional.layer_norm(
        indexer.wk(x_BSD), (indexer.head_dim,), indexer.k_norm.weight, indexer.k_norm.bias, 1e-6
    )
    q_BSHC, k_BSC = _turned(q_BSHC, cos[:, :, None], sin[:, :, None], rope), _turned(k_BSC, cos, sin, rope)
    hits_BSHS = torch.relu(torch.einsum("bqhc,bkc->bqhk", q_BSHC, k_BSC)) * indexer.head_dim**-0.5
    gates_BSH = indexer.weights_proj(x_BSD) * indexer.n_heads**-0.5
    scores_BSS = torch.einsum("bqh,bqhk->bqk", gates_BSH, hits_BSHS)
    p_BSS = weights_BHSS.sum(dim=1)
    p_BSS = p_BSS / p_BSS.sum(dim=-1, keepdim=True)
    ours_BSS = scores_BSS.masked_fill(p_BSS == 0, -torch.inf).softmax(dim=-1)
    nats_BSS = torch.where(p_BSS > 0, p_BSS * (p_BSS / torch.where(p_BSS > 0, ours_BSS, 1.0)).log(), 0.0)
    return nats_BSS.sum(dim=-1).mean()


def _turned(x: Tensor, cos: Tensor, sin: Tensor, rope: int) -> Tensor:
    """The first `rope` columns rotated, by halves."""
    a, b, rest = x.split((rope // 2, rope // 2, x.shape[-1] - rope), dim=-1)
    half_cos, half_sin = cos[..., : rope // 2], sin[..., : rope // 2]
    return torch.cat((a * half_cos - b * half_sin, b * half_cos + a * half_sin, rest), dim=-1)
