"""Slots as small integers: what one row of a pipeline does next, without a micro-batch index.

A token is a kind and a chunk, of which a row has up to `MOST_CHUNKS`: the k-th F of a chunk is of its k-th micro-batch,
W (of chunk 0, whichever chunk's it is) takes the oldest input gradient whose weight gradient is still due. A slot is a
token, or an unordered pair of them.
"""

from __future__ import annotations

from collections.abc import Iterable

Slots = tuple[tuple[int, ...], ...]  # [row][position]: a schedule

MOST_CHUNKS = 16
F, B, I, W = (kind * MOST_CHUNKS for kind in range(4))  # of chunk 0; W + chunk only where a time is looked up
NUM_TOKENS = 4 * MOST_CHUNKS
NUM_CODES = NUM_TOKENS * (NUM_TOKENS + 1)  # of slots


def pair(a: int, b: int) -> int:
    """The slot of two tokens that overlap."""
    return NUM_TOKENS * (min(a, b) + 1) + max(a, b)


def tokens_of(slot: int) -> tuple[int, ...]:
    """The one or two tokens of a slot, ascending."""
    return (slot,) if slot < NUM_TOKENS else (slot // NUM_TOKENS - 1, slot % NUM_TOKENS)


def slot_of(tokens: Iterable[int]) -> int:
    """Inverse of `tokens_of`, in any order."""
    one, *other = tokens
    return pair(one, other[0]) if other else one


def kind_of(token: int) -> str:
    """F, B, I or W."""
    return "FBIW"[token // MOST_CHUNKS]


def chunk_of(token: int) -> int:
    """The chunk of a token; 0 of a W in a slot."""
    return token % MOST_CHUNKS
