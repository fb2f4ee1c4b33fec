"""Slices of tensors: what a rank holds of a logical tensor, and how the tensor is put together again."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.contract.slices import Slice


def cut(whole: Tensor, of: Slice | None) -> Tensor:
    """What a slice has of a logical tensor; the tensor itself for None."""
    if of is None:
        return whole
    ranges = [whole.narrow(of.dimension, begin, end - begin) for begin, end in of.ranges]
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges, of.dimension)


def place(whole: Tensor, of: Slice, held: Tensor) -> None:
    """Put what a slice has to its ranges of a logical tensor."""
    parts = held.split([end - begin for begin, end in of.ranges], of.dimension)
    for (begin, end), part in zip(of.ranges, parts, strict=True):
        whole.narrow(of.dimension, begin, end - begin).copy_(part)
