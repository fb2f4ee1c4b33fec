"""Fill-in-the-middle: documents whose middle is moved to the end, marked by sentinel tokens.

A document of tokens `prefix middle suffix end` is read as `BEGIN prefix HOLE suffix END middle end` (PSM, the order of
DeepSeek-V3, arXiv 2412.19437, §4.1), with three more tokens. The choice of documents and of the cuts is a pure function
of the seed and the number of the document in its source. Two cuts are drawn among all places between tokens, as in
Bavarian et al. (arXiv 2207.14255); a part may be empty. Nothing is stored: documents are rearranged when they are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.data.shards import Stream, Tokens

ADDED = 3  # tokens added to a document
# BEGIN, HOLE and END: of tokenizers that are trained here, DeepSeek's, StarCoder's, SantaCoder's, Qwen's and
# CodeGemma's, Code Llama's.
SENTINELS = (
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
OF_TRAINED = SENTINELS[0]
_WHETHER, _FIRST, _SECOND = range(3)  # the random draws of a document

Draws = npt.NDArray[np.uint64]


class Rate(NamedTuple):
    """The share of documents that are rearranged, and the seed that chooses them."""

    rate: float
    seed: int


def sentinels(tokenizer_json: str) -> tuple[int, ...] | None:
    """Return the ids of BEGIN, HOLE and END in a tokenizer.json; None if it has no known sentinels."""
    tokenizer = json.loads(tokenizer_json)
    inner = tokenizer["model"].get("vocab")
    ids = {**inner} if isinstance(inner, Mapping) else {}
    ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    return next((tuple(ids[name] for name in names) for names in SENTINELS if all(name in ids for name in names)), None)


def is_infilled(documents: int, rate: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return which of the first `documents` documents of a source are rearranged."""
    drawn = _draws(np.arange(documents, dtype=np.uint64), seed, _WHETHER)
    return (drawn >> np.uint64(11)).astype(np.float64) < rate * 2**53


class InfilledStream(Stream):
    """A stream of documents, of which a share `rate` is rearranged.

    `sentinels`: ids of BEGIN, HOLE and END. `end`: the id that ends a document; it stays last.
    """

    def __init__(self, stream: Stream, rate: float, seed: int, sentinels: Sequence[int], end: int) -> None:
        self.data_path = stream.data_path
        self._stream, self._seed, self._sentinels, self._end = stream, seed, tuple(sentinels), end
        self._moved = is_infilled(stream.num_documents, rate, seed) & (np.diff(stream.starts) > 0)
        self.starts = stream.starts + ADDED * np.concatenate([np.zeros(1, np.int64), np.cumsum(self._moved)])
        self.num_tokens = int(self.starts[-1])

    def tokens(self, first: int, last: int) -> Tokens:
        """Return tokens [first, last) of the stream of all documents: [last - first] int64, a copy."""
        assert 0 <= first <= last <= self.num_tokens, f"[{first}, {last}) of {self.num_tokens} tokens"
        parts = [np.zeros(0, np.int64)]
        document = int(np.searchsorted(self.starts, first, "right")) - 1
        while first < last:
            begin, end = int(self.starts[document]), int(self.starts[document + 1])
            until = min(last, end)
            parts += self._part(document, first - begin, until - begin)
            document, first = document + 1, until
        return np.concatenate(parts)

    def _part(self, document: int, first: int, last: int) -> list[Tokens]:
        """Return tokens [first, last) of a document, without reading its other tokens."""
        begin, until = (int(self._stream.starts[index]) for index in (document, document + 1))
        if not self._moved[document]:
            return [self._stream.tokens(begin + first, begin + last)]
        stop = until - int(self._stream.tokens(until - 1, until)[0] == self._end)
        a, b = sorted(begin + self._cut(document, number, stop - begin) for number in (_FIRST, _SECOND))
        parts, position = [], 0
        spans = ((begin, a), (b, stop), (a, b), (stop, until))
        for sentinel, (low, high) in zip((*self._sentinels, None), spans, strict=True):
            if sentinel is not None:
                if first <= position < last:
                    parts.append(np.array([sentinel]))
                position += 1
            parts.append(self._stream.tokens(*(min(max(low, low + bound - position), high) for bound in (first, last))))
            position += high - low
        return parts

    def _cut(self, document: int, draw: int, length: int) -> int:
        """Draw one of the places 0 to `length` between the tokens of a document."""
        return int(_draws(np.array([document], np.uint64), self._seed, draw)[0]) * (length + 1) >> 64


def _draws(documents: Draws, seed: int, draw: int) -> Draws:
    """Return 64 random bits for each document: SplitMix64 of its number, keyed by the seed and the draw `draw`."""
    key = hashlib.blake2b(f"infill\0{seed}\0{draw}".encode(), digest_size=8).digest()
    z = (documents + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(key, "little"))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
