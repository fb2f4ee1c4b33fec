"""Random arguments for the ops of compressed attention."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.runtime.ops.source import Args, Source


def compress(source: Source, B: int = 2, S: int = 11, rate: int = 3, C: int = 4, overlap: bool = True) -> Args:
    """The last tokens of a sequence belong to no entry."""
    W = 2 * C if overlap else C
    return source.normal(B * S, 2 * W), source.normal(rate, W), S, overlap


def compressed_attention(
    source: Source,
    B: int = 2,
    S: int = 13,
    H: int = 3,
    C: int = 4,
    window: int = 4,
    rate: int = 3,
    top_k: int = 2,
    sinks: bool = True,
) -> Args:
    """With `top_k` 0, queries see all entries."""
    tensors = source.normal(B * S, H * C), source.normal(B * S, C), source.normal(B * (S // rate), C)
    chosen = choices(source, B, S, rate, top_k) if top_k else None
    return *tensors, chosen, source.normal(H) if sinks else None, S, H, window, rate


def entry_loss(
    source: Source,
    B: int = 2,
    S: int = 13,
    H: int = 3,
    J: int = 2,
    C: int = 4,
    rate: int = 3,
    top_k: int = 2,
) -> Args:
    """Arguments of `indexer_loss` over chosen entries, or over all if `top_k` is 0."""
    E, width = B * (S // rate), 5
    ours = source.normal(B * S, J * width), source.normal(E, width), source.normal(B * S, J)
    chosen = choices(source, B, S, rate, top_k) if top_k else None
    return *ours, source.normal(B * S, H * C), None, source.normal(E, C), chosen, S, J, H, 0, rate, None, None


def choices(source: Source, B: int, S: int, rate: int, top_k: int) -> Tensor:
    """[B·S, K] int32: some of the entries that each query sees, in ascending order, then −1."""
    entries, beyond = S // rate, S
    seen_S1 = (torch.arange(S) + 1)[:, None] // rate
    score_BSE = torch.rand(B, S, entries, generator=source.generator)
    score_BSE.masked_fill_(torch.arange(entries) >= seen_S1, -1.0)
    score_BSK, number_BSK = score_BSE.topk(min(top_k, entries), dim=2)
    number_BSK = number_BSK.masked_fill(score_BSK < 0, beyond).sort(dim=2).values
    number_BSK = torch.nn.functional.pad(number_BSK, (0, top_k - number_BSK.shape[2]), value=beyond)
    return number_BSK.masked_fill(number_BSK == beyond, -1).flatten(0, 1).to(torch.int32)


def block_linear(source: Source, T: int = 5, G: int = 3, K: int = 4, N: int = 2) -> Args:
    return source.normal(T, G * K), source.normal(G * N, K)


def unweighted_rmsnorm(source: Source, T: int = 5, H: int = 3, C: int = 7, eps: float = 1e-6) -> Args:
    return source.normal(T, H * C), H, eps
