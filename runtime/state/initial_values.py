"""What parameters and tables are at first: a function of (seed, logical name) alone, the same on any ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

TABLE_ROWS = 4096  # that are drawn at a time


def initial_value(
    seed: int, name: str, shape: Sequence[int], init: float | None, *, uniform: bool = False, mean: float = 0.0
) -> Tensor:
    """Normal with standard deviation `init` (None: ones), drawn in float32 from a generator of (seed, name); or
    `uniform`, between bounds that have this deviation. Around `mean`."""
    if init is None:
        return torch.ones(tuple(shape))
    values, generator = torch.empty(tuple(shape)), _generator(seed, name)
    if uniform:
        bound = math.sqrt(3) * init
        return values.uniform_(mean - bound, mean + bound, generator=generator)
    return values.normal_(mean, init, generator=generator)


def initial_table(seed: int, name: str, shape: Sequence[int], below: int) -> Tensor:
    """Rows of different whole numbers below `below` (int32), in a random order: the first ones of a permutation of all,
    drawn from a generator of (seed, name)."""
    rows, columns = shape
    generator = _generator(seed, name)
    sizes = (min(TABLE_ROWS, rows - first) for first in range(0, rows, TABLE_ROWS))
    drawn = (torch.rand((size, below), generator=generator) for size in sizes)
    return torch.cat([each.argsort(dim=1, stable=True)[:, :columns].int() for each in drawn])


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
