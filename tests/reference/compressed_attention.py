"""Attention of DeepSeek-V4 in the reference: a window and compressed entries (arXiv 2606.19348, section 2.3).

Shapes: B sequences · S tokens · D hidden · H heads of W columns · E entries · X keys and entries · C a latent's rank
· J heads of an indexer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.reference.attention import norm, rmsnorm, weight
from tests.reference.config import Compressed, Indexer, Rope
from tests.reference.indexer import LightningIndexer
from tests.reference.rotation import rotate_last


def entries(x_BSD: Tensor, part: nn.Module, rope: Rope | None, eps: float) -> Tensor:
    """[B, E, W], window by window: means of values weighted by a softmax of gates, normed and rotated. `part` has the
    weights; if they have twice as many columns as its gain, the first half is for the preceding window."""
    rate, W = len(part.pool_bias), len(part.pool_norm)
    values, gates = functional.linear(x_BSD, part.pool).chunk(2, dim=2)
    pooled = [values[:, :0, :W]]
    for start in range(0, x_BSD.shape[1] - rate + 1, rate):
        window, preceding = slice(start, start + rate), slice(start - rate, start)
        series = [(values[:, window, -W:], gates[:, window, -W:] + part.pool_bias[:, -W:])]
        if values.shape[2] > W and start:
            series.append((values[:, preceding, :W], gates[:, preceding, :W] + part.pool_bias[:, :W]))
        of_entry, logits = (torch.cat(tensors, dim=1) for tensors in zip(*series, strict=True))
        pooled.append((logits.softmax(dim=1) * of_entry).sum(dim=1, keepdim=True))
    normed_BEW = rmsnorm(torch.cat(pooled, dim=1), part.pool_norm, eps)
    return rotate_last(normed_BEW[:, :, None], rope, rate)[:, :, 0]


class EntryIndexer(LightningIndexer):
    """Scores of each query for all entries, with separate entries of the indexer."""

    def __init__(self, hidden: int, query_rank: int, sizes: Indexer, rate: int) -> None:
        nn.Module.__init__(self)
        self.sizes, self.dense = sizes, False
        self.q = weight(sizes.heads * sizes.head_dim, query_rank)
        self.pool = weight(4 * sizes.head_dim, hidden)
        self.pool_bias = weight(rate, 2 * sizes.head_dim)
        self.pool_norm = norm(sizes.head_dim)
        self.weights = weight(sizes.heads, hidden)
        self.nats: list[Tensor] = []

    def chosen(self, scores_BSE: Tensor, before_SE: Tensor) -> Tensor:
        """[B, S, E]: the entries that each query attends to. Of equal scores the entry in front is chosen."""
        if self.dense:
            return before_SE.expand_as(scores_BSE)
        order = scores_BSE.detach().masked_fill(~before_SE, -torch.inf).sort(dim=-1, descending=True, stable=True)
        best_BSE = torch.zeros_like(scores_BSE).scatter_(-1, order.indices[..., : self.sizes.top_k], 1.0)
        return before_SE & (best_BSE > 0)

    def entry_scores(self, x_BSD: Tensor, latent_BSC: Tensor, rope: Rope | None, eps: float) -> Tensor:
        """I_BSE."""
        x_BSD, latent_BSC = x_BSD.detach(), latent_BSC.detach()
        q_BSJW = rotate_last(functional.linear(latent_BSC, self.q).unflatten(-1, (self.sizes.heads, -1)), rope)
        hits_BSEJ = torch.relu(torch.einsum("bsjw,bew->bsej", q_BSJW, entries(x_BSD, self, rope, eps)))
        gates_BSJ = functional.linear(x_BSD, self.weights)
        return torch.einsum("bsej,bsj->bse", hits_BSEJ, gates_BSJ) * (self.sizes.head_dim * self.sizes.heads) ** -0.5

    def compare(self, scores_BSE: Tensor, chosen_BSE: Tensor, logits_BHSE: Tensor) -> None:
        """Add Σ KL(p || softmax(I)) over the chosen entries; p is the mean of the heads' attention to only these."""
        some_BS = chosen_BSE.any(dim=-1)
        hidden = ~chosen_BSE[some_BS]
        theirs = logits_BHSE.detach().transpose(1, 2)[some_BS].masked_fill(hidden[:, None], -torch.inf)
        p = theirs.softmax(dim=-1).mean(dim=1)
        log = scores_BSE[some_BS].masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0)
        self.nats.append((torch.xlogy(p, p) - p * log).sum())


class CompressedAttention(nn.Module):
    """One head that is keys and values at once, over a window, and entries of all that is before a query."""

    def __init__(self, hidden: int, attention: Compressed, norm_eps: float) -> None:
        super().__init__()
        self.attention, self.norm_eps = attention, norm_eps
        H, W, rank = attention.heads, attention.head_dim, attention.groups * attention.out_rank
        self.norm = norm(hidden)
        self.q_down = weight(attention.query_rank, hidden)
        self.q_norm = norm(attention.query_rank)
        self.q_up = weight(H * W, attention.query_rank)
        self.kv = weight(W, hidden)
        self.kv_norm = norm(W)
        if attention.compress:
            rate, indexer = attention.compress.rate, attention.compress.indexer
            series = 2 if indexer else 1
            self.pool = weight(2 * series * W, hidden)
            self.pool_bias = weight(rate, series * W)
            self.pool_norm = norm(W)
            self.indexer = EntryIndexer(hidden, attention.query_rank, indexer, rate) if indexer else None
        if attention.sinks:
            self.sinks = weight(H)
        self.group_out = weight(rank, H * W // attention.groups)
        self.out = weight(hidden, rank)

    def forward(self, h_BSD: Tensor) -> Tensor:
        """h_BSD: [B, S, D], the residual stream -> [B, S, D], to be added to it."""
        sizes, S = self.attention, h_BSD.shape[1]
        x_BSD = rmsnorm(h_BSD, self.norm, self.norm_eps)
        latent_BSC = rmsnorm(functional.linear(x_BSD, self.q_down), self.q_norm, self.norm_eps)
        q_BSHW = functional.linear(latent_BSC, self.q_up).unflatten(2, (sizes.heads, -1))
        q_BSHW = rmsnorm(q_BSHW, torch.ones_like(self.kv_norm), self.norm_eps)
        kv_BSW = rmsnorm(functional.linear(x_BSD, self.kv), self.kv_norm, self.norm_eps)
        q_BSHW, keys_BXW = rotate_last(q_BSHW, sizes.rope), rotate_last(kv_BSW[:, :, None], sizes.rope)[:, :, 0]
        distance_SS = torch.arange(S)[:, None] - torch.arange(S)
        seen_BSX = ((distance_SS >= 0) & (distance_SS < sizes.window)).expand(len(x_BSD), -1, -1)
        if sizes.compress:
            rate, E = sizes.compress.rate, S // sizes.compress.rate
            keys_BXW = torch.cat([keys_BXW, entries(x_BSD, self, sizes.rope, self.norm_eps)], dim=1)
            ends_E = rate * (torch.arange(E) + 1)  # the first position after the tokens of an entry
            seen_BSE = (ends_E <= torch.arange(S)[:, None] + 1).expand(len(x_BSD), -1, -1)
            if self.indexer:
                rope = sizes.rope and replace(sizes.rope, width=sizes.rope.width or sizes.head_dim)  # as many columns
                scores_BSE = self.indexer.entry_scores(x_BSD, latent_BSC, rope, self.norm_eps)
                seen_BSE = self.indexer.chosen(scores_BSE, seen_BSE[0])
            seen_BSX = torch.cat([seen_BSX, seen_BSE], dim=2)
        logits_BHSX = torch.einsum("bshw,bxw->bhsx", q_BSHW, keys_BXW) * sizes.head_dim**-0.5
        if sizes.compress and self.indexer:
            self.indexer.compare(scores_BSE, seen_BSE, logits_BHSX[..., S:])
        weights_BHSX = logits_BHSX.exp() * seen_BSX[:, None]
        total_BHS1 = weights_BHSX.sum(dim=3, keepdim=True)
        if sizes.sinks:
            total_BHS1 = total_BHS1 + self.sinks.exp()[:, None, None]
        o_BSHW = torch.einsum("bhsx,bxw->bshw", weights_BHSX / total_BHS1, keys_BXW)
        o_BSX = rotate_last(o_BSHW, sizes.rope, -1).flatten(2)
        blocks = zip(o_BSX.chunk(sizes.groups, dim=2), self.group_out.chunk(sizes.groups), strict=True)
        return functional.linear(torch.cat([functional.linear(o, block) for o, block in blocks], dim=2), self.out)
