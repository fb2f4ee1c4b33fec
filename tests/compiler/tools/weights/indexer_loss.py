"""The loss of indexers for models of `transformers`, whose classes have none: in torch operations, for autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def indexer_losses(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the loss of each layer with an indexer while the model computes: the mean over the tokens."""
    losses: list[Tensor] = []

    def hook(attention: nn.Module, args: Any, given: dict[str, Any], result: tuple[Tensor, Tensor]) -> None:
        cos, sin = given["position_embeddings"]
        losses.append(_loss(attention, given["hidden_states"].detach(), cos, sin, result[1].detach()))

    def hook_of_entries(attention: nn.Module, args: Any, given: dict[str, Any], result: tuple[Tensor, Tensor]) -> None:
        x_BSD = given["hidden_states"] if "hidden_states" in given else args[0]
        losses.append(_loss_of_entries(attention, x_BSD.detach(), given["position_ids"], result[1].detach()))

    layers = [module for module in model.modules() if hasattr(module, "indexer") and hasattr(module, "q_a_layernorm")]
    of_entries = [module for module in model.modules() if hasattr(getattr(module, "compressor", None), "indexer")]
    hooks = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(hook_of_entries, with_kwargs=True) for layer in of_entries]
    yield losses
    for handle in hooks:
        handle.remove()


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
    return _divergence(scores_BSS, weights_BHSS)


def _loss_of_entries(attention: Any, x_BSD: Tensor, position_ids: Tensor, weights_BHSK: Tensor) -> Tensor:
    """Return the loss for DeepSeek-V4, whose indexer scores only the compressed entries: in the attention weights, they
    follow the keys of the window."""
    indexer, scores = attention.compressor.indexer, []
    latent = attention.q_a_norm(attention.q_a_proj(x_BSD)).detach()
    listening = indexer.scorer.register_forward_hook(lambda module, args, result: scores.append(result))
    indexer(x_BSD, latent, position_ids, None, attention.layer_idx)
    listening.remove()
    of_entries = weights_BHSK[..., x_BSD.shape[1] :]
    total = of_entries.sum(dim=-1, keepdim=True)
    return _divergence(scores[0], of_entries / torch.where(total > 0, total, 1.0))


def _divergence(scores_BSK: Tensor, weights_BHSK: Tensor) -> Tensor:
    """The mean over the queries; 0 of one that attends to none of the keys."""
    p_BSK = weights_BHSK.sum(dim=1)
    seen_BSK, total_BS1 = p_BSK > 0, p_BSK.sum(dim=-1, keepdim=True)
    p_BSK = p_BSK / torch.where(total_BS1 > 0, total_BS1, 1.0)
    none_BS1 = ~seen_BSK.any(dim=-1, keepdim=True)
    ours_BSK = scores_BSK.masked_fill(~seen_BSK & ~none_BS1, -torch.inf).softmax(dim=-1)
    nats_BSK = torch.where(seen_BSK, p_BSK * (p_BSK / torch.where(seen_BSK, ours_BSK, 1.0)).log(), 0.0)
    return nats_BSK.sum(dim=-1).mean()


def _turned(x: Tensor, cos: Tensor, sin: Tensor, rope: int) -> Tensor:
    """The first `rope` columns rotated, by halves."""
    a, b, unrotated = x.split((rope // 2, rope // 2, x.shape[-1] - rope), dim=-1)
    half_cos, half_sin = cos[..., : rope // 2], sin[..., : rope // 2]
    return torch.cat((a * half_cos - b * half_sin, b * half_cos + a * half_sin, unrotated), dim=-1)
