"""User-defined layers for the tests of this folder."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Geglu(nn.Module):
    """A gated feed-forward part with biases, and a gain that begins at one."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)
        self.gain = nn.Parameter(torch.ones(hidden))
        self.slope = nn.Parameter(torch.full((2 * hidden,), 0.75))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(functional.gelu(gate * self.slope, approximate="tanh") * up) * self.gain


class Shared(nn.Module):
    """A low-rank layer that reads its matrix twice, and writes in place into its own intermediate."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(hidden, 5))
        self.scale = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.matrix
        h += self.scale * self.scale
        return nn.functional.silu(h, inplace=True) @ self.matrix.T


class Widths(nn.Module):
    """A part whose parameters share one shape and one gradient, and whose output is a view."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(hidden)) for _ in range(2))
        self.norm = nn.LayerNorm(hidden)
        self.mix = nn.Parameter(torch.randn(3, hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("td,cde->cte", self.norm(x), self.mix).softmax(dim=0)
        first, second, _ = y.unbind(0)
        return (first.T * second.T + (self.a + self.b)[:, None]).T


class Convolution(nn.Module):
    """Mixing along a sequence by a causal convolution of each channel."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.along = nn.Conv1d(hidden, hidden, 3, groups=hidden)
        self.across = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        padded = functional.pad(x.transpose(1, 2), (2, 0))
        return self.across(functional.silu(self.along(padded).transpose(1, 2)))


class GatedAttention(nn.Module):
    """Causal attention of four heads behind a gate."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.gate = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, hidden // 4).permute(2, 0, 3, 1, 4).unbind(0)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).reshape(batch, length, hidden) * torch.sigmoid(self.gate(x)))


class LinearAttention(nn.Module):
    """Attention without softmax; weights decay with distance. Positions and mask are computed in `forward`."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.fade = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(x.shape[-1], dim=-1)
        positions = torch.arange(x.shape[1], device=x.device)
        distance = (positions[:, None] - positions[None, :]).to(x.dtype)
        weights = torch.exp(-functional.softplus(self.fade) * distance.clamp(min=0))
        weights = torch.where(distance >= 0, weights, 0.0)
        return ((functional.elu(q) + 1) @ (functional.elu(k) + 1).transpose(1, 2) * weights) @ v


FFNS = ("Geglu", "Shared", "Widths")
ATTENTIONS = ("Convolution", "GatedAttention", "LinearAttention")
