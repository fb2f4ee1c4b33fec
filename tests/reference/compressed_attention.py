"""Attention of DeepSeek-V4 in the reference: a window and compressed entries (arXiv 2606.19348, section 2.3).

Shapes: B sequences · S tokens · D hidden · H heads of W columns · E entries · X keys and entries · C a latent's rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.reference.attention import norm, rmsnorm, weight
from tests.reference.config import Compressed
from tests.reference.rotation import rotate_last


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
            self.pool = weight(2 * W, hidden)
            self.pool_bias = weight(attention.compress.rate, W)
            self.pool_norm = norm(W)
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
        seen_SX = (distance_SS >= 0) & (distance_SS < sizes.window)
        if sizes.compress:
            rate, E = sizes.compress.rate, S // sizes.compress.rate
            entries_BEW = rotate_last(self.entries(x_BSD, rate)[:, :, None], sizes.rope, rate)[:, :, 0]
            keys_BXW = torch.cat([keys_BXW, entries_BEW], dim=1)
            ends_E = rate * (torch.arange(E) + 1)  # the first position behind the tokens of an entry
            seen_SX = torch.cat([seen_SX, ends_E <= torch.arange(S)[:, None] + 1], dim=1)
        logits_BHSX = torch.einsum("bshw,bxw->bhsx", q_BSHW, keys_BXW) * sizes.head_dim**-0.5
        weights_BHSX = logits_BHSX.exp() * seen_SX
        total_BHS1 = weights_BHSX.sum(dim=3, keepdim=True)
        if sizes.sinks:
            total_BHS1 = total_BHS1 + self.sinks.exp()[:, None, None]
        o_BSHW = torch.einsum("bhsx,bxw->bshw", weights_BHSX / total_BHS1, keys_BXW)
        o_BSX = rotate_last(o_BSHW, sizes.rope, -1).flatten(2)
        blocks = zip(o_BSX.chunk(sizes.groups, dim=2), self.group_out.chunk(sizes.groups), strict=True)
        return functional.linear(torch.cat([functional.linear(o, block) for o, block in blocks], dim=2), self.out)

    def entries(self, x_BSD: Tensor, rate: int) -> Tensor:
        """[B, E, W], window by window: means of values by a softmax of gates, normed."""
        values_BSW, gates_BSW = functional.linear(x_BSD, self.pool).chunk(2, dim=2)
        found = [values_BSW[:, :0]]
        for start in range(0, x_BSD.shape[1] - rate + 1, rate):
            window = slice(start, start + rate)
            shares_BTW = (gates_BSW[:, window] + self.pool_bias).softmax(dim=1)
            found.append((shares_BTW * values_BSW[:, window]).sum(dim=1, keepdim=True))
        return rmsnorm(torch.cat(found, dim=1), self.pool_norm, self.norm_eps)
