"""Random tensors for the cases of ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Args = tuple[Any, ...]


class Source:
    """Random tensors of one dtype from one seed."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator).to(self.dtype)

    def below(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(bound, shape, generator=self.generator)

    def choices(self, tokens: int, experts: int, top_k: int) -> Tensor:
        """[tokens, top_k]: distinct experts for each token."""
        return torch.rand(tokens, experts, generator=self.generator).topk(top_k).indices

    def order(self, tokens: int, experts: int, top_k: int) -> Tensor:
        return torch.argsort(self.choices(tokens, experts, top_k).flatten(), stable=True)


def starts(source: Source, B: int, S: int) -> Tensor:
    """[B·S] int32: where the documents of B sequences begin, some three in each."""
    begins_BS = (torch.rand(B, S, generator=source.generator) < min(0.5, 3 / S)).long()
    begins_BS[:, 0] = 1
    return (begins_BS * torch.arange(S)).cummax(dim=1).values.flatten().to(torch.int32)


def places(source: Source, B: int, S: int, documents: bool, some: bool) -> tuple[Tensor | None, Tensor | None]:
    """The document starts of rows, if `documents`, and the positions of `some` rows: fewer than half of each sequence,
    or one row."""
    begins = starts(source, B, S) if documents else None
    if not some:
        return begins, None
    chosen_BQ = torch.rand(B, S, generator=source.generator).topk(max(1, S // 2 - 1), dim=1).indices.sort(dim=1).values
    if begins is not None:
        begins = begins.view(B, S).gather(1, chosen_BQ).flatten()
    return begins, chosen_BQ.flatten().to(torch.int32)
