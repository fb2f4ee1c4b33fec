"""Duplicate documents: equal ones by a hash, similar ones by MinHash of `datasketch`.

Documents are equal if their texts differ only in white space and Unicode composition (NFC). The similarity of two
documents is the Jaccard similarity of their sets of five-word shingles. Words are compared without case and
punctuation; a letter of a script without spaces, such as Chinese or Thai, is a word. MinHash estimates the similarity
as the share of equal values among 128 minima (Broder, SEQUENCES 1997): it is binomial, with a standard deviation of
0.035 at 0.8. An LSH index finds the candidates to compare with.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.data.files import INSTALL, DataError, import_extra

MINIMA = 128
RUN = 5  # words
DIGEST_BYTES = 16
AT_ONCE = 4096  # shingles; datasketch holds MINIMA values for each
WEIGHTS = (0.05, 0.95)  # of false positives and false negatives of the index; candidates are compared exactly
MAX_THRESHOLD = 0.995  # threshold of the index: near 1 datasketch finds no bands; candidates are compared in any case
LIBRARY, PURPOSE = "datasketch", "to find near duplicates"
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ over the golden ratio; odd, so that multiplication is invertible
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Japanese and Chinese
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
Signature = npt.NDArray[np.uint32]


def version() -> str:
    """Return the version of `datasketch`, on which signatures depend. DataError if it is not installed."""
    try:
        return metadata.version(LIBRARY)
    except metadata.PackageNotFoundError:
        raise DataError(f"{PURPOSE}, {LIBRARY} has to be installed: {INSTALL}") from None


def digest(text: str) -> bytes:
    """Return the hash that is equal for equal documents, DIGEST_BYTES long."""
    normal = " ".join(unicodedata.normalize("NFC", text).split())
    return hashlib.blake2b(normal.encode(), digest_size=DIGEST_BYTES).digest()


def words(text: str) -> Iterator[str]:
    """Yield the words from which shingles are made."""
    return (match[0] for match in _WORD.finditer(unicodedata.normalize("NFC", text).casefold()))


class _Hashes(dict[str, int]):
    """64-bit hashes of words. A document of 64 MiB has millions of words; only distinct ones are stored."""

    def __missing__(self, word: str) -> int:
        self[word] = hashed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        return hashed


def signature(text: str) -> Signature:
    """Return the MinHash values of a document, [MINIMA]. A document of fewer than five words has one shingle, of all
    its words. Without words all values are the maximum."""
    hashes_W = np.fromiter(map(_Hashes().__getitem__, words(text)), np.uint64)
    size = min(RUN, len(hashes_W))
    runs_G = np.zeros(len(hashes_W) - size + 1 if size else 0, np.uint64)
    for offset in range(size):
        runs_G = runs_G * FACTOR + hashes_W[offset : offset + len(runs_G)]
    minima, different_G = _minhash(), np.unique(runs_G >> np.uint64(32))
    for first in range(0, len(different_G), AT_ONCE):
        minima.update_batch(different_G[first : first + AT_ONCE].tolist())
    return np.asarray(minima.hashvalues, np.uint32)


def _minhash(values: Signature | None = None) -> Any:
    """Return a MinHash of 32-bit integers, empty or with the values of a signature."""
    return _library().MinHash(
        num_perm=MINIMA, hashfunc=int, hashvalues=values, permutations=_permutations(), scheme="affine32"
    )


@cache
def _permutations() -> Any:
    return _library().MinHash(num_perm=MINIMA, scheme="affine32").permutations


def _library() -> Any:
    return import_extra(LIBRARY, PURPOSE)


class SeenDocuments:
    """The documents that were kept so far. `similarity`: None if only equal documents are duplicates.

    A kept document takes about 7 KB of memory with near duplicates, else some 100 bytes.
    """

    def __init__(self, similarity: float | None) -> None:
        self._digests: set[bytes] = set()
        self._least = None if similarity is None else math.ceil(similarity * MINIMA - 1e-9)
        if similarity is not None:
            self._index = _library().MinHashLSH(
                threshold=min(similarity, MAX_THRESHOLD), num_perm=MINIMA, weights=WEIGHTS
            )
            self._signatures: Signature = np.zeros((1024, MINIMA), np.uint32)
            self._num_signatures = 0

    def is_near(self, signature: Signature) -> bool:
        """Whether a kept document is similar to the one with this signature."""
        assert self._least is not None
        candidates: Sequence[int] = self._index.query(_minhash(signature))
        if not candidates:
            return False
        equal = np.count_nonzero(self._signatures[candidates] == signature, axis=1)
        return bool(equal.max() >= self._least)

    def add(self, digest: bytes, signature: Signature | None) -> str:
        """Return "exact" or "near" if a document is a duplicate, else keep it and return "". `signature`: None without
        near duplicates."""
        if digest in self._digests:
            return "exact"
        if signature is not None and signature.min() < np.iinfo(np.uint32).max:
            if self.is_near(signature):
                return "near"
            if self._num_signatures == len(self._signatures):
                self._signatures = np.concatenate([self._signatures, np.zeros_like(self._signatures)])
            self._signatures[self._num_signatures] = signature
            self._index.insert(self._num_signatures, _minhash(signature), check_duplication=False)
            self._num_signatures += 1
        self._digests.add(digest)
        return ""
