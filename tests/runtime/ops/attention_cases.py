"""Random arguments for the ops of attention, rotation and the indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops import OPS
from tests.runtime.ops.source import Args, Source, places


def mla_attention(
    source: Source,
    B: int = 2,
    S: int = 9,
    H: int = 3,
    nope: int = 6,
    rope: int = 4,
    value: int = 5,
    theta: float = 1e4,
    documents: bool = False,
    some: bool = False,
) -> Args:
    T, spans = B * S, places(source, B, S, documents, some)
    queries = T if spans[1] is None else len(spans[1])
    tensors = source.normal(queries, H * (nope + rope)), source.normal(T, H * (nope + value)), source.normal(T, rope)
    return *tensors, S, H, nope, rope, value, 0.0 if some else theta, *spans


def gqa_attention(
    source: Source,
    B: int = 2,
    S: int = 9,
    G: int = 2,
    r: int = 3,
    C: int = 4,
    theta: float = 1e4,
    documents: bool = False,
    some: bool = False,
) -> Args:
    T, spans = B * S, places(source, B, S, documents, some)
    queries = T if spans[1] is None else len(spans[1])
    tensors = source.normal(queries, G * r * C), source.normal(T, G * C), source.normal(T, G * C)
    return *tensors, S, G * r, G, 0.0 if some else theta, *spans


def bounded_attention(
    source: Source,
    B: int = 2,
    S: int = 9,
    G: int = 2,
    r: int = 3,
    C: int = 4,
    theta: float = 1e4,
    window: int = 4,
    softcap: float = 2.0,
    sinks: bool = True,
    documents: bool = False,
    some: bool = False,
) -> Args:
    *tensors, S, H, G, theta, begins, positions = gqa_attention(source, B, S, G, r, C, theta, documents, some)
    return *tensors, source.normal(H) if sinks else None, S, H, G, theta, window, softcap, begins, positions


def select_keys(
    source: Source,
    B: int = 2,
    S: int = 9,
    H: int = 3,
    C: int = 4,
    top_k: int = 3,
    rate: int = 1,
    documents: bool = False,
    some: bool = False,
) -> Args:
    spans = places(source, B, S, documents, some)
    T = B * S if spans[1] is None else len(spans[1])
    tensors = source.normal(T, H * C), source.normal(B * (S // rate), C), source.normal(T, H)
    return *tensors, S, H, top_k, rate, *spans


def chosen(source: Source, B: int, S: int, top_k: int, documents: bool = False) -> Tensor:
    """[B·S, K] int32: for each query some of the visible keys, including its own."""
    begins = places(source, B, S, documents, False)[0]
    rows = []
    for t in range(B * S):
        first = 0 if begins is None else int(begins[t])
        visible = first + torch.randperm(t % S - first + 1, generator=source.generator)
        row = visible[:top_k].sort().values.tolist()
        rows.append(row + [-1] * (top_k - len(row)))
    return torch.tensor(rows, dtype=torch.int32)


def chosen_attention(
    source: Source,
    B: int = 2,
    S: int = 9,
    H: int = 3,
    nope: int = 6,
    rope: int = 4,
    value: int = 5,
    top_k: int = 3,
    documents: bool = False,
) -> Args:
    *tensors, _, _, _, _, _, _, _, _ = mla_attention(source, B, S, H, nope, rope, value)
    return *tensors, chosen(source, B, S, top_k, documents), S, H, nope, rope, value


def indexer_loss(
    source: Source,
    B: int = 2,
    S: int = 9,
    heads: int = 3,
    index_heads: int = 2,
    C: int = 6,
    nope: int = 5,
    rope: int = 4,
    value: int = 3,
    top_k: int = 4,
    documents: bool = False,
    some: bool = False,
) -> Args:
    """Over the chosen keys; over all if `top_k` is 0."""
    spans = places(source, B, S, documents, some)
    T = B * S if spans[1] is None else len(spans[1])
    ours = source.normal(T, index_heads * C), source.normal(B * S, C), source.normal(T, index_heads)
    *theirs, _, _, _, _, _, _, _, _ = mla_attention(source, B, S, heads, nope, rope, value)
    theirs[0] = source.normal(T, heads * (nope + rope))
    keys = select_of(ours, S, index_heads, top_k, spans) if top_k else None
    return *ours, *theirs, keys, S, index_heads, heads, nope, 1, *spans


def select_of(ours: tuple[Tensor, ...], S: int, heads: int, top_k: int, where: tuple[Tensor | None, ...]) -> Tensor:
    return OPS["select_keys"](*ours, S, heads, top_k, 1, *where)


def rotate(
    source: Source,
    B: int = 2,
    S: int = 9,
    H: int = 3,
    first: int = 2,
    width: int = 6,
    behind: int = 1,
    original: float = 20.0,
    magnitude: float = 1.3,
    scale: float = 0.7,
    documents: bool = False,
    some: bool = False,
    stride: int = 1,
) -> Args:
    """Frequencies of 50^(−i/3): with `original`, the second of three is on the ramp; without it, all are."""
    low, high = (0.5, 2.0) if original else (-0.5, 3.5)
    spans = places(source, B, S, documents, some)
    x = source.normal(B * (S // abs(stride)) if spans[1] is None else len(spans[1]), H * (first + width + behind))
    options = 50.0, 8.0, low, high, original, magnitude, scale
    return x, S, H, first, width, *options, *spans, stride
