"""Linear attention of the reference: a gated delta rule (arXiv 2412.06464, 2510.26692), one token after the other.

Shapes: B sequences · S tokens · D hidden · H heads of values, G of keys · K width of a key, V of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.reference.attention import norm, rmsnorm, weight
from tests.reference.config import DeltaNet


def delta_rule(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, beta_BSH: Tensor, decay_BSHK: Tensor) -> Tensor:
    """Apply the delta rule: return [B, S, H, V], the read of each query from a state that decays and stores values."""
    B, S, H, K = k_BSHK.shape
    state_BHKV, read = v_BSHV.new_zeros(B, H, K, v_BSHV.shape[-1]), []
    for t in range(S):
        state_BHKV = state_BHKV * decay_BSHK[:, t, :, :, None]
        had_BHV = torch.einsum("bhk,bhkv->bhv", k_BSHK[:, t], state_BHKV)
        change_BHV = beta_BSH[:, t, :, None] * (v_BSHV[:, t] - had_BHV)
        state_BHKV = state_BHKV + torch.einsum("bhk,bhv->bhkv", k_BSHK[:, t], change_BHV)
        read.append(torch.einsum("bhk,bhkv->bhv", q_BSHK[:, t], state_BHKV) / K**0.5)
    return torch.stack(read, dim=1)


class GatedDeltaNet(nn.Module):
    """Linear attention on a normed input."""

    def __init__(self, hidden: int, attention: DeltaNet, norm_eps: float) -> None:
        super().__init__()
        self.attention, self.norm_eps = attention, norm_eps
        G, H, K, V = attention.key_heads, attention.heads, attention.key_dim, attention.value_dim
        self.norm = norm(hidden)
        self.qkv = weight(2 * G * K + H * V, hidden)
        self.convolution = weight(2 * G * K + H * V, attention.convolution)
        self.beta = weight(H, hidden)
        if attention.gate == "channel":
            self.decay_down, self.gate_down = weight(V, hidden), weight(V, hidden)
        width, decays = (V, H * K) if attention.gate == "channel" else (hidden, H)
        self.decay, self.decay_bias, self.decay_rate = weight(decays, width), weight(decays), weight(H)
        self.gate = weight(H * V, width)
        self.out_norm = norm(V)
        self.out = weight(hidden, H * V)

    def forward(self, h_BSD: Tensor) -> Tensor:
        """h_BSD: [B, S, D], the residual stream -> [B, S, D], to be added to it."""
        sizes = self.attention
        G, H, K, V = sizes.key_heads, sizes.heads, sizes.key_dim, sizes.value_dim
        x_BSD = rmsnorm(h_BSD, self.norm, self.norm_eps)
        all_BNS = functional.linear(x_BSD, self.qkv).mT
        taps = self.convolution[:, None]
        all_BNS = functional.conv1d(functional.pad(all_BNS, (taps.shape[2] - 1, 0)), taps, groups=taps.shape[0])
        q_BSGK, k_BSGK, v_BSHV = (
            part.unflatten(-1, (heads, -1))
            for part, heads in zip(
                functional.silu(all_BNS).mT.split([G * K, G * K, H * V], dim=-1), (G, G, H), strict=True
            )
        )
        q_BSHK, k_BSHK = (
            (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(H // G, dim=2)
            for part in (q_BSGK, k_BSGK)
        )
        low = sizes.gate == "channel"
        decay = functional.linear(functional.linear(x_BSD, self.decay_down) if low else x_BSD, self.decay)
        exponent_BSHW = functional.softplus(decay + self.decay_bias, threshold=1e9).unflatten(-1, (H, -1))
        decay_BSHK = torch.exp(-torch.exp(self.decay_rate)[:, None] * exponent_BSHW).expand(-1, -1, -1, K)
        beta_BSH = torch.sigmoid(functional.linear(x_BSD, self.beta))
        o_BSHV = delta_rule(q_BSHK, k_BSHK, v_BSHV, beta_BSH, decay_BSHK)
        gate = functional.linear(functional.linear(x_BSD, self.gate_down) if low else x_BSD, self.gate)
        share = torch.sigmoid(gate) if low else functional.silu(gate)
        normed = rmsnorm(o_BSHV, self.out_norm, self.norm_eps).flatten(2)
        return functional.linear(normed * share, self.out)
