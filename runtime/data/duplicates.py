"""Documents that were there before: equal ones by a hash, and similar ones by MinHash of `datasketch`.

Equal are documents whose text differs in white space and Unicode's forms of composition (NFC) alone. The similarity of
two documents is the Jaccard similarity of their sets of runs of five words: how many they share, of all that one has.
Words are compared without case and punctuation; a letter of a script that is written without blanks, such as Chinese
or Thai, is a word. MinHash estimates it as the share of equal values among 128 minima (Broder, SEQUENCES 1997): it is
binomial, with a standard deviation of 0.035 at 0.8. An index of bands (LSH) finds what to compare with.
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

from runtime.data.files import INSTALL, DataError, extra

MINIMA = 128
RUN = 5  # words
DIGEST_BYTES = 16
AT_ONCE = 4096  # runs, of which datasketch keeps MINIMA values each
WEIGHTS = (0.05, 0.95)  # of finding too much and too little in the index: what it finds is compared
MOST = 0.995  # threshold of an index: near 1 datasketch finds no bands; what the index finds is compared in any case
LIBRARY, PURPOSE = "datasketch", "to find near duplicates"
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying loses nothing: 2⁶⁴ over the golden ratio
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Japanese and Chinese
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
Signature = npt.NDArray[np.uint32]


def version() -> str:
    """The version of `datasketch`, which decides signatures. Raises DataError where it is not installed."""
    try:
        return metadata.version(LIBRARY)
    except metadata.PackageNotFoundError:
        raise DataError(f"{PURPOSE}, {LIBRARY} has to be installed: {INSTALL}") from None


def digest(text: str) -> bytes:
    """The hash by which equal documents are found, DIGEST_BYTES long."""
    normal = " ".join(unicodedata.normalize("NFC", text).split())
    return hashlib.blake2b(normal.encode(), digest_size=DIGEST_BYTES).digest()


def words(text: str) -> Iterator[str]:
    """The words of which five in a row are compared."""
    return (match[0] for match in _WORD.finditer(unicodedata.normalize("NFC", text).casefold()))


class _Hashes(dict[str, int]):
    """Hashes of words, 64 bits. A document of 64 MiB has millions of words, but keeps different ones alone."""

    def __missing__(self, word: str) -> int:
        self[word] = found = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        return found


def signature(text: str) -> Signature:
    """The minima of a document, [MINIMA]. A document of fewer than five words has one run, of all of them; one
    without words has all minima at their greatest value."""
    hashes_W = np.fromiter(map(_Hashes().__getitem__, words(text)), np.uint64)
    size = min(RUN, len(hashes_W))
    runs_G = np.zeros(len(hashes_W) - size + 1 if size else 0, np.uint64)
    for at in range(size):
        runs_G = runs_G * FACTOR + hashes_W[at : at + len(runs_G)]
    minima, different_G = _minhash(), np.unique(runs_G >> np.uint64(32))
    for first in range(0, len(different_G), AT_ONCE):
        minima.update_batch(different_G[first : first + AT_ONCE].tolist())
    return np.asarray(minima.hashvalues, np.uint32)


def _minhash(values: Signature | None = None) -> Any:
    """A MinHash whose items are whole numbers of 32 bits, empty or of a signature."""
    return _library().MinHash(
        num_perm=MINIMA, hashfunc=int, hashvalues=values, permutations=_permutations(), scheme="affine32"
    )


@cache
def _permutations() -> Any:
    return _library().MinHash(num_perm=MINIMA, scheme="affine32").permutations


def _library() -> Any:
    return extra(LIBRARY, PURPOSE)


class SeenDocuments:
    """The documents that were kept so far. `similarity`: None where equal documents alone are duplicates.

    A document that is kept takes about 7 KB of memory where near duplicates are found, else some 100 bytes.
    """

    def __init__(self, similarity: float | None) -> None:
        self._digests: set[bytes] = set()
        self._least = None if similarity is None else math.ceil(similarity * MINIMA - 1e-9)
        if similarity is not None:
            self._index = _library().MinHashLSH(threshold=min(similarity, MOST), num_perm=MINIMA, weights=WEIGHTS)
            self._kept: Signature = np.zeros((1024, MINIMA), np.uint32)
            self._num_kept = 0

    def is_near(self, signature: Signature) -> bool:
        """Whether a kept document is similar to that of this signature."""
        assert self._least is not None
        found: Sequence[int] = self._index.query(_minhash(signature))
        if not found:
            return False
        equal = np.count_nonzero(self._kept[found] == signature, axis=1)
        return bool(equal.max() >= self._least)

    def add(self, digest: bytes, signature: Signature | None) -> str:
        """Whether a document is a duplicate, "exact" or "near"; else "", and it is kept. `signature`: None where no
        near duplicates are looked for."""
        if digest in self._digests:
            return "exact"
        if signature is not None and signature.min() < np.iinfo(np.uint32).max:
            if self.is_near(signature):
                return "near"
            if self._num_kept == len(self._kept):
                self._kept = np.concatenate([self._kept, np.zeros_like(self._kept)])
            self._kept[self._num_kept] = signature
            self._index.insert(self._num_kept, _minhash(signature), check_duplication=False)
            self._num_kept += 1
        self._digests.add(digest)
        return ""
