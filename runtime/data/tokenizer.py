"""Byte-level BPE: trained on the training documents, or parsed from a `tokenizer.json`.

Every text has tokens (the 256 bytes are in the alphabet), and decode(encode(text)) == text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.data.files import DataError, MissingError, near, open_regular

END = "<|endoftext|>"
# What ends a document in published tokenizers, the first present is used: ours and GPT-2's, DeepSeek's, Llama's.
END_TOKENS = (END, "<｜end▁of▁sentence｜>", "<|end_of_text|>", "</s>")
MIN_VOCAB = 257  # 256 bytes and END
MAX_FILE_BYTES = 256 << 20


def train(texts: Iterable[str], vocab: int, special: Sequence[str] = ()) -> Tokenizer:
    """A BPE of exactly `vocab` tokens: END, which is token 0, then `special`, bytes and merges. Equal texts in any
    order give an equal result.

    Raises DataError when `vocab` is too small for bytes and special tokens, or when the texts have too few repetitions
    to fill it.
    """
    if vocab < MIN_VOCAB + len(special):
        words = ", ".join((END, *special))
        raise DataError(f"tokenizer = train({vocab}): at least {MIN_VOCAB + len(special)}, the 256 bytes and {words}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab:
        raise DataError(f"tokenizer = train({vocab}): the training text yields {found} tokens; write train({found})")
    return _plain(tokenizer)


def read(path: Path) -> bytes:
    """The bytes of a `tokenizer.json`. Raises DataError if it cannot be read."""
    try:
        with open_regular(path) as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        kind = MissingError if isinstance(error, FileNotFoundError) else DataError
        meant = near(path) if kind is MissingError else ""
        raise kind(f"{path}: no tokenizer can be read: {error.strerror or error}{meant}") from None
    if len(content) > MAX_FILE_BYTES:
        raise DataError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB")
    return content


def parse(content: bytes, end: str | None = None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`. Raises DataError if it is none, or if no token of it ends a document.

    `end`: the token that does, as `eos_token` beside it says; else one of END_TOKENS.
    """
    try:
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"not a tokenizer.json: {error}") from None
    if end is not None and tokenizer.token_to_id(end) is None:
        raise DataError(f"{end}, which tokenizer_config.json has as eos_token, is not in the vocabulary")
    if end is None and all(tokenizer.token_to_id(token) is None for token in END_TOKENS):
        raise DataError(
            f"none of {', '.join(END_TOKENS)} is in the vocabulary: which token ends a document? Beside it, put a "
            'tokenizer_config.json with "eos_token"'
        )
    return _plain(tokenizer)


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """Whole documents, always cut alike; a document that quotes END gets its bytes, not the token."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    return tokenizer


def parse_special(tokenizer: Tokenizer) -> None:
    """Let special tokens in a text be tokens, as prompts and the texts of chat templates have them."""
    tokenizer.encode_special_tokens = False


def in_front(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that a tokenizer.json puts in front of every text.

    `add_bos_token` of tokenizer_config.json adds none: `transformers` does not read it beside a tokenizer.json.
    """
    found = tokenizer.encode("a", add_special_tokens=True)
    return [i for i, _ in takewhile(lambda pair: pair[1], zip(found.ids, found.special_tokens_mask, strict=True))]


def is_special(tokenizer: Tokenizer, index: int) -> bool:
    """Whether an id is that of a special token."""
    added = tokenizer.get_added_tokens_decoder().get(index)
    return added is not None and bool(added.special)


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, nothing added at either end."""
    return [found.ids for found in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of the ids, END written out. Bytes that are no UTF-8 (a token cut in half) become U+FFFD."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


def end_id(tokenizer: Tokenizer, end: str | None = None) -> int:
    """The id of the token that ends a document: of `end`, or of the first of END_TOKENS that there is."""
    ids = (tokenizer.token_to_id(token) for token in (END_TOKENS if end is None else (end,)))
    return next(found for found in ids if found is not None)


def size(tokenizer: Tokenizer) -> int:
    """One more than the largest id."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def to_json(tokenizer: Tokenizer) -> str:
    """The `tokenizer.json`, exact inverse of `parse`."""
    text: str = tokenizer.to_str(pretty=True)
    return text + "\n"


def digest(tokenizer: Tokenizer) -> str:
    """sha256 of its `tokenizer.json`."""
    return hashlib.sha256(to_json(tokenizer).encode()).hexdigest()


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


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
