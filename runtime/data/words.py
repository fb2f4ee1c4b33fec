"""Token ids by looking up words, for a byte-level BPE: the same as the library's, in a third of its time.

Such a tokenizer cuts a text into words and spaces by GPT-2's pattern, and each of them has its tokens whatever stands
beside it. A corpus has few different ones (the 2.5M of Python's standard library are 47,000), so the library is asked
once for each. The pattern is known here for ASCII; what holds anything else, and any other tokenizer, is the library's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tokenizers import Tokenizer

from runtime.data import tokenizer

# tokenizers/pre_tokenizers/byte_level.rs, with \p{L} and \p{N} as they are in ASCII
WORD = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
PIECE = 1 << 12  # characters
MAX_HELD, WORD_COST = 1 << 24, 32  # characters of the words that are kept, each with what it takes beside


class Encoder:
    """Token ids of texts; keeps those of words it has met."""

    def __init__(self, bpe: Tokenizer) -> None:
        self._bpe = bpe
        self._by_words = is_byte_level(bpe)
        self._ids: dict[str, list[int]] = {}
        self._held = 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, equal to those of `tokenizer.encode`."""
        if not self._by_words:
            return tokenizer.encode(self._bpe, texts)
        parts = [(index, piece) for index, text in enumerate(texts) for piece in pieces(text)]
        others = iter(tokenizer.encode(self._bpe, [piece for _, piece in parts if not piece.isascii()]))
        result: list[list[int]] = [[] for _ in texts]
        for index, piece in parts:
            result[index].extend(self._of(piece) if piece.isascii() else next(others))
        return result

    def _of(self, piece: str) -> Iterable[int]:
        if self._held > MAX_HELD:
            self._ids, self._held = {}, 0
        words = WORD.findall(piece)
        new = [word for word in dict.fromkeys(words) if word not in self._ids]
        self._ids.update(zip(new, tokenizer.encode(self._bpe, new), strict=True))
        self._held += sum(map(len, new)) + WORD_COST * len(new)
        return chain.from_iterable(map(self._ids.__getitem__, words))


def is_byte_level(bpe: Tokenizer) -> bool:
    """Whether a tokenizer is a BPE that cuts by GPT-2's pattern and does nothing else to a text."""
    parts = json.loads(bpe.to_str())
    before = parts["pre_tokenizer"] or {}
    return (
        parts["model"]["type"] == "BPE"
        and parts["normalizer"] is None
        and {name: before.get(name) for name in BYTE_LEVEL} == BYTE_LEVEL
        and all(added["special"] for added in parts["added_tokens"])  # these are not looked for: see `_plain`
    )


def pieces(text: str) -> Iterator[str]:
    """A text cut before line feeds that follow something printed: there no word spans, and no pattern looks across."""
    begin = 0
    while (end := text.find("\n", begin + PIECE)) > 0:
        while end > 0 and not "!" <= text[end - 1] <= "~":
            end = text.find("\n", end + 1)
        if end < 0:
            break
        yield text[begin:end]
        begin = end
    yield text[begin:]
