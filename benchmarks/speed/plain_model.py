"""DeepSeek-V3 in plain PyTorch, as compact as nanochat's GPT: latent attention, and a loop over the experts.

The path of a parameter in the module tree is its name in a build, so weights are loaded by name.

Shapes: B sequences · S tokens of a sequence · T tokens of all sequences · D hidden · V vocab · H heads · R the rotated
columns of a head · E experts · K experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.reference.config import Config, Dense, Mla, Moe


class Plain(nn.Module):
    """The whole model: tokens [B, S] → logits [B, S, V]. `attention`: the kernel, sdpa or eager."""

    def __init__(self, config: Config, attention: str) -> None:
        super().__init__()
        mla = config.attention
        assert isinstance(mla, Mla) and mla.rope and not mla.rope.scaling, "other attention has no plain model"
        rotated = mla.head_dim.rope
        self.eps = config.norm_eps
        self.embedding = matrix(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, mla, ffn, attention) for ffn in config.layers)
        self.final_norm = norm(config.hidden)
        self.head = matrix(config.vocab, config.hidden)
        turns_R = mla.rope.theta ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
        angle_SR = torch.outer(torch.arange(config.sequence, dtype=torch.float64), turns_R)
        self.register_buffer("cos", angle_SR.cos().float(), persistent=False)
        self.register_buffer("sin", angle_SR.sin().float(), persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = functional.embedding(tokens_BS, self.embedding)
        for layer in self.layers:
            x_BSD = layer(x_BSD, self.cos, self.sin)
        return functional.linear(rmsnorm(x_BSD, self.final_norm, self.eps), self.head)


class Layer(nn.Module):
    """Attention and a feed-forward part, each added to the residual stream."""

    def __init__(self, config: Config, mla: Mla, ffn: Dense | Moe, attention: str) -> None:
        super().__init__()
        self.attention = LatentAttention(config, mla, attention)
        self.ffn = Experts(config, ffn) if isinstance(ffn, Moe) else Normed(config, ffn.inner)

    def forward(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(x_BSD, cos_SR, sin_SR)
        out_BSD: Tensor = x_BSD + self.ffn(x_BSD)
        return out_BSD


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    def __init__(self, config: Config, mla: Mla, kernel: str) -> None:
        super().__init__()
        assert mla.query_rank is not None and mla.scale is None
        self.heads, self.dims, self.kv_rank, self.kernel = mla.heads, mla.head_dim, mla.kv_rank, kernel
        self.eps = config.norm_eps
        query, key_value = mla.head_dim.nope + mla.head_dim.rope, mla.head_dim.nope + mla.head_dim.value
        self.norm = norm(config.hidden)
        self.q_down = matrix(mla.query_rank, config.hidden)
        self.q_norm = norm(mla.query_rank)
        self.q_up = matrix(mla.heads * query, mla.query_rank)
        self.kv_down = matrix(mla.kv_rank + mla.head_dim.rope, config.hidden)
        self.kv_norm = norm(mla.kv_rank)
        self.kv_up = matrix(mla.heads * key_value, mla.kv_rank)
        self.out = matrix(config.hidden, mla.heads * mla.head_dim.value)

    def forward(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        x_BSD = rmsnorm(x_BSD, self.norm, self.eps)
        nope, rope, value = self.dims.nope, self.dims.rope, self.dims.value
        q = functional.linear(
            rmsnorm(functional.linear(x_BSD, self.q_down), self.q_norm, self.eps), self.q_up
        ).unflatten(-1, (self.heads, nope + rope))
        latent, k_rope = functional.linear(x_BSD, self.kv_down).split([self.kv_rank, rope], dim=-1)
        kv = functional.linear(rmsnorm(latent, self.kv_norm, self.eps), self.kv_up)
        k_nope, v = kv.unflatten(-1, (self.heads, nope + value)).split([nope, value], dim=-1)
        k_rope = rotated(k_rope.unsqueeze(2), cos_SR, sin_SR).expand(-1, -1, self.heads, -1)
        q = torch.cat([q[..., :nope], rotated(q[..., nope:], cos_SR, sin_SR)], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        mixed_BHSU = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return functional.linear(mixed_BHSU.transpose(1, 2).flatten(2), self.out)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention: [B, H, S, columns of a head] each → [B, H, S, columns of a value]."""
        if self.kernel == "sdpa":
            # Its fast kernel takes values only if they are as wide as keys.
            padded = functional.pad(v, (0, k.shape[-1] - v.shape[-1]))
            return functional.scaled_dot_product_attention(q, k, padded, is_causal=True)[..., : v.shape[-1]]
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, float("-inf")).softmax(-1, dtype=torch.float32).to(v.dtype) @ v


class Ffn(nn.Module):
    """SwiGLU between two matrices; of an expert, or of the experts that all tokens share."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = matrix(2 * inner, hidden)
        self.down = matrix(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, self.up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.down)


class Normed(Ffn):
    """The feed-forward part of a dense layer."""

    def __init__(self, config: Config, inner: int) -> None:
        super().__init__(config.hidden, inner)
        self.norm, self.eps = norm(config.hidden), config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(rmsnorm(x, self.norm, self.eps))


class Router(nn.Module):
    """The sigmoid gate of DeepSeek-V3: the best groups by their two best experts, then the best experts of these."""

    def __init__(self, hidden: int, moe: Moe) -> None:
        super().__init__()
        assert moe.score == "sigmoid" and moe.choice == "scores" and moe.normalize
        self.moe = moe
        self.weight = matrix(moe.experts, hidden)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights, both [T, K]."""
        score_TE = torch.sigmoid(functional.linear(x_TD.float(), self.weight.float()))
        grouped = score_TE.detach().unflatten(-1, (self.moe.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.moe.top_groups, dim=-1).indices
        kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        chosen_TK = grouped.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(1).topk(self.moe.top_k, dim=-1).indices
        gate_TK = score_TE.gather(1, chosen_TK)
        return chosen_TK, gate_TK / (gate_TK.sum(-1, keepdim=True) + 1e-20) * self.moe.scale


class Experts(nn.Module):
    """The feed-forward part of an MoE layer."""

    def __init__(self, config: Config, moe: Moe) -> None:
        super().__init__()
        self.norm, self.eps = norm(config.hidden), config.norm_eps
        self.router = Router(config.hidden, moe)
        self.shared = Ffn(config.hidden, moe.inner * moe.shared)
        self.experts = nn.ModuleList(Ffn(config.hidden, moe.inner) for _ in range(moe.experts))

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = rmsnorm(x_BSD, self.norm, self.eps).flatten(0, 1)
        y_TD: Tensor = self.shared(x_TD) + self.routed(x_TD, *self.router(x_TD))
        return y_TD.view_as(x_BSD)

    # The numbers of rows change in each step: a compiled loop would be compiled in each step.
    @torch.compiler.disable
    def routed(self, x_TD: Tensor, chosen_TK: Tensor, gate_TK: Tensor) -> Tensor:
        """Rows in the order of their experts, one expert after the other."""
        chosen = chosen_TK.flatten()
        order = chosen.argsort(stable=True)
        token = order // chosen_TK.shape[1]
        rows = x_TD[token].split(chosen.bincount(minlength=len(self.experts)).tolist())
        out = torch.cat([expert(part) for expert, part in zip(self.experts, rows, strict=True)])
        weighted = (out * gate_TK.flatten()[order].unsqueeze(-1)).to(x_TD.dtype)
        return torch.zeros_like(x_TD).index_add(0, token, weighted)


# ---------------------------------------------------------------- parts


def matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns))


def norm(width: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(width))


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps)


def rotated(x_BSHR: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Columns (2i, 2i + 1) turned by the angle of their position."""
    even, odd = x_BSHR.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_SR.unsqueeze(1).to(x_BSHR.dtype), sin_SR.unsqueeze(1).to(x_BSHR.dtype)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
