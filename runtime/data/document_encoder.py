"""Encodes documents as `tokenizers` does, with gigatoken where its ids are equal, which is tens of times as fast.

gigatoken knows byte-level BPE with the patterns of published models and refuses others. That it agrees is checked: on
texts that are hard to split when an encoder is made, and on the first documents. Otherwise `tokenizers` encodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from runtime.data import tokenizer

Ids = npt.NDArray[np.int64]
Encode = Callable[[Sequence[str]], list[Ids]]
CHECKED_LENGTH = 1 << 16  # characters of the first documents
RENEWED_AFTER = 1 << 27  # characters: gigatoken keeps all words that it has met, about 100 bytes of memory for each
HARD_TEXTS = (
    "",
    "I'll don't WE'VE it's\u2019s 'S",
    "  two  spaces \t tab\t\t\n\n \n\r\n\r  end  \u00a0\u2003x\u3000 ",
    "0 12 123 1234567890 3.14159 ½ ² Ⅷ ௫ ٣٤٥",
    "naïve Straße a\u0301 e\u0301\u0327 \u1e9e ﬁ Ǆ ʼn",
    "中文字符 ひらがなカタカナ 한국어 עברית العربية हिन्दी ไทย",
    "👩\u200d👩\u200d👧 🏳️\u200d🌈 \u200b\u200d\ufeff\ufffd \U0010ffff",
    "def f(x):\n    return x**2  # ++--==!=<>{}[]()\\/_`~@$%^&|;:'\"?,.\n",
    "https://a.b/c?d=e&f#g foo_bar fooBar FooBAR x1y2 ...!!! ---\n\n\n",
    "a" * 300 + " " * 70 + "\n" * 40 + "-" * 100,
)


class DocumentEncoder:
    """The token ids of documents, without special tokens added. A document that quotes a special token gets its bytes.

    `bpe`: from `tokenizer.parse`.
    """

    def __init__(self, bpe: Tokenizer) -> None:
        self._bpe = bpe
        self._fast = _fast(bpe)
        self._unchecked, self._encoded = CHECKED_LENGTH, 0
        if self.is_fast:
            specials = (token.content for token in bpe.get_added_tokens_decoder().values())
            self._compare([*HARD_TEXTS, *(f"a {text}b {text}" for text in specials)])

    @property
    def is_fast(self) -> bool:
        """Whether gigatoken encodes."""
        return self._fast is not None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text."""
        if self.is_fast and self._unchecked > 0:
            first = []
            for text in texts:
                first.append(text[: self._unchecked])
                self._unchecked -= len(text)
                if self._unchecked <= 0:
                    break
            self._compare(first)
        if self.is_fast and self._encoded > RENEWED_AFTER:
            self._fast, self._encoded = _fast(self._bpe), 0
        self._encoded += sum(map(len, texts))
        found = self._try_fast(texts)
        return self._reference(texts) if found is None else found

    def _compare(self, texts: Sequence[str]) -> None:
        """Stop using gigatoken if it differs."""
        found = self._try_fast(texts)
        if found is not None and not all(map(np.array_equal, found, self._reference(texts))):
            self._fast = None

    def _try_fast(self, texts: Sequence[str]) -> list[Ids] | None:
        """The ids from gigatoken. Returns None, and stops using it, if it fails."""
        if self._fast is None:
            return None
        try:
            return self._fast(texts)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException:  # a Rust panic is no Exception
            self._fast = None
            return None

    def _reference(self, texts: Sequence[str]) -> list[Ids]:
        return [np.asarray(ids, np.int64) for ids in tokenizer.encode(self._bpe, texts)]


def _fast(bpe: Tokenizer) -> Encode | None:
    """The encoder of gigatoken, or None if it is not installed or does not know the tokenizer."""
    document: dict[str, Any] = json.loads(bpe.to_str())
    # `parse` has special tokens encoded as any text, for which gigatoken has no option.
    document["added_tokens"] = [token for token in document["added_tokens"] if not token["special"]]
    document["post_processor"] = None
    try:
        import awkward
        import gigatoken

        library = gigatoken.Tokenizer.from_json(json.dumps(document))
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException:  # the library raises nothing narrower, and a Rust panic is no Exception
        return None

    def encode(texts: Sequence[str]) -> list[Ids]:
        if not texts:
            return []
        encoded = library.encode_batch(list(texts))
        ids = awkward.to_numpy(awkward.flatten(encoded)).astype(np.int64)
        return np.split(ids, np.cumsum(awkward.to_numpy(awkward.num(encoded)))[:-1])

    return encode
