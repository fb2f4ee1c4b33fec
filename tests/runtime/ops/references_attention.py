"""Slow references of attention and rotation, differentiable by torch's autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def by_document(op: Callable[..., Tensor], tensors: tuple[Tensor, ...], starts: Tensor, sequence: int) -> Tensor:
    """The op on each document separately. `op` takes the rows of `tensors` of one document, and their number."""
    firsts = [t for t, start in enumerate(starts.tolist()) if t % sequence == start]
    ends = [*firsts[1:], len(starts)]
    rows = [op(*(x[first:end] for x in tensors), end - first) for first, end in zip(firsts, ends, strict=True)]
    return torch.cat(rows)


def of_some(
    op: Callable[..., Tensor], x: Tensor, B: int, sequence: int, starts: Tensor | None, positions: Tensor
) -> Tensor:
    """The rows at `positions` of the op on whole sequences with `x` in these rows and zeros in the others."""
    rows = (positions.view(B, -1) + sequence * torch.arange(B)[:, None]).flatten()
    full = x.new_zeros(B * sequence, x.shape[1]).index_copy(0, rows, x)
    if starts is None:
        return op(full, None)[rows]
    begins = torch.zeros(B, sequence, dtype=torch.int64)
    begins.scatter_(1, starts.view(B, -1).long(), starts.view(B, -1).long())
    return op(full, begins.cummax(dim=1).values.flatten())[rows]


def turn(x: Tensor, theta: float) -> Tensor:
    """RoPE of x [B, S, H, rope], with a rotation matrix for every position and pair; no rotation if theta is 0."""
    if not theta:
        return x
    rope = x.shape[3]
    turned = torch.zeros_like(x)
    for position in range(x.shape[1]):
        for pair in range(rope // 2):
            angle = torch.tensor(position * theta ** (-2 * pair / rope), dtype=torch.float64)
            cos, sin = angle.cos(), angle.sin()
            rotation = torch.stack((torch.stack((cos, -sin)), torch.stack((sin, cos)))).to(x.dtype)
            of_pair = slice(2 * pair, 2 * pair + 2)
            turned[:, position, :, of_pair] = x[:, position, :, of_pair] @ rotation.T
    return turned


def mla_attention(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    theta: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    if positions is not None:
        sizes = sequence, heads, nope, rope, value, theta
        B = len(kv) // sequence
        return of_some(
            lambda q, begins: mla_attention(q, kv, k_rope, *sizes, begins), q, B, sequence, starts, positions
        )
    if starts is not None:
        alone = lambda q, kv, k_rope, size: mla_attention(q, kv, k_rope, size, heads, nope, rope, value, theta)  # noqa: E731
        return by_document(alone, (q, kv, k_rope), starts, sequence)
    q_BSHC = q.reshape(-1, sequence, heads, nope + rope)
    kv_BSHW = kv.reshape(-1, sequence, heads, nope + value)
    q_rope = turn(q_BSHC[..., nope:], theta)
    shared = turn(k_rope.reshape(-1, sequence, 1, rope), theta)[:, :, 0]
    scores = torch.einsum("bqhc,bkhc->bhqk", q_BSHC[..., :nope], kv_BSHW[..., :nope])
    scores = (scores + torch.einsum("bqhc,bkc->bhqk", q_rope, shared)) / (nope + rope) ** 0.5
    future = torch.arange(sequence)[None, :] > torch.arange(sequence)[:, None]
    weights = functional.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
    return torch.einsum("bhqk,bkhv->bqhv", weights, kv_BSHW[..., nope:]).reshape(q.shape[0], heads * value)


def gqa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Query head by query head."""
    if positions is not None:
        sizes, B = (sequence, heads, kv_heads, theta), len(k) // sequence
        return of_some(lambda q, begins: gqa_attention(q, k, v, *sizes, begins), q, B, sequence, starts, positions)
    if starts is not None:
        alone = lambda q, k, v, size: gqa_attention(q, k, v, size, heads, kv_heads, theta)  # noqa: E731
        return by_document(alone, (q, k, v), starts, sequence)
    q_BSHC = turn(q.reshape(-1, sequence, heads, q.shape[1] // heads), theta)
    k_BSGC = turn(k.reshape(-1, sequence, kv_heads, k.shape[1] // kv_heads), theta)
    v_BSGC = v.reshape(k_BSGC.shape)
    mixed = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = q_BSHC[:, :, head] @ k_BSGC[:, :, shared].mT / q_BSHC.shape[3] ** 0.5
        future = torch.arange(sequence)[None, :] > torch.arange(sequence)[:, None]
        mixed.append(functional.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v_BSGC[:, :, shared])
    return torch.cat(mixed, dim=-1).reshape(q.shape)


def bounded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    window: int,
    softcap: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Query by query, over the visible keys."""
    if positions is not None:
        sizes, B = (sequence, heads, kv_heads, theta, window, softcap), len(k) // sequence
        of_all = lambda q, begins: bounded_attention(q, k, v, sinks, *sizes, begins)  # noqa: E731
        return of_some(of_all, q, B, sequence, starts, positions)
    if starts is not None:
        options = heads, kv_heads, theta, window, softcap
        alone = lambda q, k, v, size: bounded_attention(q, k, v, sinks, size, *options)  # noqa: E731
        return by_document(alone, (q, k, v), starts, sequence)
    q_BSHC = q.reshape(-1, sequence, heads, q.shape[1] // heads)
    k_BSGC = k.reshape(-1, sequence, kv_heads, k.shape[1] // kv_heads)
    q_BSHC, k_BSGC = turn(q_BSHC, theta), turn(k_BSGC, theta)
    v_BSGC = v.reshape(k_BSGC.shape)
    rows = []
    for position in range(sequence):
        first = max(0, position + 1 - window) if window else 0
        heads_BC = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            keys_BKC, values_BKC = k_BSGC[:, first : position + 1, shared], v_BSGC[:, first : position + 1, shared]
            logits_BK = torch.einsum("bc,bkc->bk", q_BSHC[:, position, head], keys_BKC) / q_BSHC.shape[3] ** 0.5
            if softcap:
                logits_BK = softcap * torch.tanh(logits_BK / softcap)
            weights_BK = torch.exp(logits_BK)
            total_B1 = weights_BK.sum(1, keepdim=True)
            if sinks is not None:
                total_B1 = total_B1 + torch.exp(sinks[head])
            heads_BC.append(torch.einsum("bk,bkc->bc", weights_BK / total_B1, values_BKC))
        rows.append(torch.cat(heads_BC, dim=1))
    return torch.stack(rows, dim=1).reshape(q.shape)


def rotate(
    x: Tensor,
    sequence: int,
    heads: int,
    first: int,
    width: int,
    theta: float,
    factor: float,
    low: float,
    high: float,
    original: float,
    magnitude: float,
    scale: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
    stride: int = 1,
) -> Tensor:
    """With a matrix for every position, which rotates each pair by its angle; rows are `stride` positions apart."""
    if positions is not None:
        sizes = sequence, heads, first, width, theta, factor, low, high, original, magnitude, scale
        return of_some(lambda x, begins: rotate(x, *sizes, begins), x, 1, sequence, starts, positions)
    if starts is not None:
        options = heads, first, width, theta, factor, low, high, original, magnitude, scale
        return by_document(lambda x, size: rotate(x, size, *options), (x,), starts, sequence)
    C = x.shape[1] // heads
    x_BSHC = x.reshape(-1, sequence // abs(stride), heads, C)
    rows = []
    for row in range(x_BSHC.shape[1]):
        matrix = torch.eye(C, dtype=torch.float64)
        for pair in range(width // 2):
            frequency = theta ** (-2 * pair / width)
            rotations = original * frequency / (2 * torch.pi) if original else pair
            share = min(1.0, max(0.0, (rotations - low) / (high - low)))
            divided = 1 - share if original else share
            turned = row * stride * (divided * frequency / factor + (1 - divided) * frequency)
            angle = torch.tensor(turned, dtype=torch.float64)
            block = torch.stack((torch.stack((angle.cos(), -angle.sin())), torch.stack((angle.sin(), angle.cos()))))
            of_pair = slice(first + 2 * pair, first + 2 * pair + 2)
            matrix[of_pair, of_pair] = magnitude * block
        rows.append(scale * x_BSHC[:, row] @ matrix.to(x.dtype).T)
    return torch.stack(rows, dim=1).reshape(x.shape)
