"""Slots as small integers: what one row of a pipeline does next, without a micro-batch index.

A token is a kind and a chunk (0 the near stage of a rank, 1 the far one): the k-th F of a chunk is of its k-th
micro-batch, W takes the oldest input gradient whose weight gradient is still due. A slot is a token, or an unordered
pair of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations_with_replacement

Slots = tuple[tuple[int, ...], ...]  # [row][position]: a schedule

F0, F1, B0, B1, I0, I1, W = range(7)
W1 = 7  # only where a time is looked up: a W of the far chunk
NUM_CODES = 80
KIND = "FFBBIIWW"  # by token


def pair(a: int, b: int) -> int:
    """The slot of two tokens that overlap."""
    return 8 * (min(a, b) + 1) + max(a, b)


def tokens_of(slot: int) -> tuple[int, ...]:
    """The one or two tokens of a slot, ascending."""
    return (slot,) if slot < 8 else ((slot >> 3) - 1, slot & 7)


def slot_of(tokens: Iterable[int]) -> int:
    """Inverse of `tokens_of`, in any order."""
    one, *other = tokens
    return pair(one, other[0]) if other else one


PAIRS = tuple(pair(a, b) for a, b in combinations_with_replacement(range(7), 2))
