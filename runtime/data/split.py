"""Which documents are held out for validation.

A document is on the side that a hash says: of (seed, name of the file) for a file that is one document, of (seed, text)
for a line of a `.jsonl`. So a document stays on its side when others come or go, and lines of equal text are on one
side, whatever files they are in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from runtime.data.errors import DataError
from runtime.data.readers import SourceFile, documents

RANKS = 1 << 64


@dataclass(frozen=True, slots=True)
class Split:
    """Held out is what has a rank below `limit`; a limit of 0 holds out nothing."""

    seed: int
    limit: int

    def is_held(self, file: SourceFile, text: str) -> bool:
        """Whether a document is held out for validation."""
        return self.limit > 0 and rank(self.seed, file.name if file.is_one_document else text) < self.limit


def split(
    files: Iterable[SourceFile],
    fraction: float,
    seed: int,
    read: Callable[[SourceFile], Iterable[str]] = documents,
) -> Split:
    """A split that holds out about `fraction` of the documents, and none of them if it is 0. `read`: those of a file.

    Both sides get at least one: where chance leaves a side empty, the limit is moved to the nearest rank. Reads as many
    documents as it takes to know that neither is. Raises DataError for a fraction outside [0, 1), or where there are no
    two documents to divide.
    """
    if not 0 <= fraction < 1:
        raise DataError(f"validation = {fraction!r}: expected a share of the documents, from 0 to below 1")
    if fraction == 0:
        return Split(0, 0)  # the seed decides nothing
    limit = max(1, int(fraction * RANKS))
    lowest, highest, file = RANKS, -1, None
    for file in files:
        for text in read(file):
            found = rank(seed, file.name if file.is_one_document else text)
            lowest, highest = min(lowest, found), max(highest, found)
            if lowest < limit <= highest:
                return Split(seed, limit)
    if lowest >= highest:
        raise DataError(
            f"{file.path if file else 'data'}: a single document cannot be divided: give more files, write its parts "
            "as lines of a .jsonl, or leave `validation` out"
        )
    return Split(seed, highest if highest < limit else lowest + 1)


def rank(seed: int, word: str) -> int:
    """A hash of (seed, word), uniform in [0, 2⁶⁴)."""
    text = f"{seed}\0{word}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
