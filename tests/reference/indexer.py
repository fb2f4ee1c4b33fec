"""The indexer of latent attention (arXiv 2512.02556, section 2.1): which keys each query sees, and what trains it.

Shapes: B sequences · S tokens · D hidden · C the latent of queries · J heads of the indexer, W wide · H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.reference.config import Indexer, Rope
from tests.reference.rotation import rotate


class LightningIndexer(nn.Module):
    """Scores of each query for all keys, from inputs without gradient."""

    def __init__(self, hidden: int, query_rank: int, sizes: Indexer) -> None:
        super().__init__()
        self.sizes, self.dense = sizes, False  # dense: the phase in which attention sees all keys
        self.q = nn.Parameter(torch.zeros(sizes.heads * sizes.head_dim, query_rank, dtype=torch.float64))
        self.k = nn.Parameter(torch.zeros(sizes.head_dim, hidden, dtype=torch.float64))
        self.k_norm = nn.Parameter(torch.ones(sizes.head_dim, dtype=torch.float64))
        self.k_bias = nn.Parameter(torch.zeros(sizes.head_dim, dtype=torch.float64))
        self.weights = nn.Parameter(torch.zeros(sizes.heads, hidden, dtype=torch.float64))
        self.nats: list[Tensor] = []  # divergences per call, summed over tokens

    def scores(self, x_BSD: Tensor, latent_BSC: Tensor, rope: Rope | None, width: int) -> Tensor:
        """I_BSS; the first `width` columns of a head are rotated."""
        x_BSD, latent_BSC = x_BSD.detach(), latent_BSC.detach()
        q_BSJW = functional.linear(latent_BSC, self.q).unflatten(-1, (self.sizes.heads, -1))
        k_BSW = functional.layer_norm(
            functional.linear(x_BSD, self.k), (self.sizes.head_dim,), self.k_norm, self.k_bias, 1e-6
        )
        q_BSJW, k_BS1W = (
            torch.cat([rotate(x[..., :width], rope), x[..., width:]], dim=-1) for x in (q_BSJW, k_BSW[:, :, None])
        )
        hits_BSSJ = torch.relu(torch.einsum("bqjw,bkw->bqkj", q_BSJW, k_BS1W[:, :, 0])) * self.sizes.head_dim**-0.5
        gates_BSJ = functional.linear(x_BSD, self.weights) * self.sizes.heads**-0.5
        return (hits_BSSJ * gates_BSJ[:, :, None]).sum(-1)

    def unseen(self, scores_BSS: Tensor) -> Tensor:
        """[B, S, S]: which keys each query does not see. Of keys with equal scores the earliest is chosen."""
        S = scores_BSS.shape[-1]
        future_SS = torch.ones(S, S).triu(1).bool()
        if self.dense:
            return future_SS.expand_as(scores_BSS)
        order_BSS = scores_BSS.detach().masked_fill(future_SS, float("-inf")).sort(dim=-1, descending=True, stable=True)
        seen_BSS = torch.zeros_like(scores_BSS, dtype=torch.bool)
        seen_BSS.scatter_(-1, order_BSS.indices[..., : self.sizes.top_k], True)
        return future_SS | ~seen_BSS

    def learn(self, scores_BSS: Tensor, unseen_BSS: Tensor, share_BHSS: Tensor) -> None:
        """Add Σ KL(p || softmax(I)) over the visible keys; p is the attention of all heads to a key."""
        p_BSS = share_BHSS.detach().sum(1)
        p_BSS = p_BSS / p_BSS.sum(-1, keepdim=True)
        log_BSS = scores_BSS.masked_fill(unseen_BSS, float("-inf")).log_softmax(-1).masked_fill(unseen_BSS, 0.0)
        self.nats.append((torch.xlogy(p_BSS, p_BSS) - p_BSS * log_BSS).sum())
