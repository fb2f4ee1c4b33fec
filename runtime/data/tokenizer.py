"""Byte-level BPE: trained on the training documents, or parsed from a `tokenizer.json`.

Every text can be encoded (the alphabet has all 256 bytes), and decode(encode(text)) == text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.data.files import DataError, MissingError, closest_name_hint, open_regular

END = "<|endoftext|>"
# Tokens that end a document in published tokenizers: ours and GPT-2's, DeepSeek's, Llama's. The first present is used.
END_TOKENS = (END, "<｜end▁of▁sentence｜>", "<|end_of_text|>", "</s>")
MIN_VOCAB = 257  # 256 bytes and END
MAX_FILE_BYTES = 256 << 20


def train(texts: Iterable[str], vocab: int, special: Sequence[str] = ()) -> Tokenizer:
    """Train a BPE of exactly `vocab` tokens: END, which is token 0, then `special`, bytes and merges. The result does
    not depend on the order of texts.

    Raises DataError if `vocab` is too small for bytes and special tokens, or if the texts have too few repetitions to
    fill it.
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
    num_tokens = tokenizer.get_vocab_size()
    if num_tokens != vocab:
        raise DataError(
            f"tokenizer = train({vocab}): the training text yields {num_tokens} tokens; write train({num_tokens})"
        )
    return _make_deterministic(tokenizer)


def read(path: Path) -> bytes:
    """Read the bytes of a `tokenizer.json`. Raises DataError if that fails."""
    try:
        with open_regular(path) as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        kind = MissingError if isinstance(error, FileNotFoundError) else DataError
        hint = closest_name_hint(path) if kind is MissingError else ""
        raise kind(f"{path}: no tokenizer can be read: {error.strerror or error}{hint}") from None
    if len(content) > MAX_FILE_BYTES:
        raise DataError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB")
    return content


def parse(content: bytes, end: str | None = None) -> Tokenizer:
    """Parse a `tokenizer.json`. Raises DataError if it is invalid, or if it has no token that ends a document.

    `end`: that token, from `eos_token` in the tokenizer's folder; None for one of END_TOKENS.
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
    return _make_deterministic(tokenizer)


def _make_deterministic(tokenizer: Tokenizer) -> Tokenizer:
    """Configure deterministic encoding of whole documents. A document that quotes END gets its bytes, not the token."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    return tokenizer


def parse_special(tokenizer: Tokenizer) -> None:
    """Encode special tokens in a text as tokens, as prompts and rendered chat templates need it."""
    tokenizer.encode_special_tokens = False


def prefix_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that a tokenizer.json puts before every text.

    `add_bos_token` of tokenizer_config.json has no effect: `transformers` ignores it if there is a tokenizer.json.
    """
    encoding = tokenizer.encode("a", add_special_tokens=True)
    return [i for i, _ in takewhile(lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask, strict=True))]


def is_special(tokenizer: Tokenizer, index: int) -> bool:
    """Whether an id belongs to a special token."""
    added = tokenizer.get_added_tokens_decoder().get(index)
    return added is not None and bool(added.special)


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, without special tokens added."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ids, with END written out. Bytes that are not UTF-8 (half a character) become U+FFFD."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


def end_id(tokenizer: Tokenizer, end: str | None = None) -> int:
    """Return the id of the token that ends a document: of `end`, or of the first of END_TOKENS that exists."""
    ids = (tokenizer.token_to_id(token) for token in (END_TOKENS if end is None else (end,)))
    return next(token_id for token_id in ids if token_id is not None)


def size(tokenizer: Tokenizer) -> int:
    """Return the largest id plus one."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def to_json(tokenizer: Tokenizer) -> str:
    """Return the `tokenizer.json`; the exact inverse of `parse`."""
    text: str = tokenizer.to_str(pretty=True)
    return text + "\n"


def digest(tokenizer: Tokenizer) -> str:
    """Return the sha256 of the `tokenizer.json`."""
    return hashlib.sha256(to_json(tokenizer).encode()).hexdigest()


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def is_byte_level(bpe: Tokenizer) -> bool:
    """Whether a tokenizer is a BPE that splits by GPT-2's pattern and does not change the text otherwise."""
    parts = json.loads(bpe.to_str())
    before = parts["pre_tokenizer"] or {}
    return (
        parts["model"]["type"] == "BPE"
        and parts["normalizer"] is None
        and {name: before.get(name) for name in BYTE_LEVEL} == BYTE_LEVEL
        and all(added["special"] for added in parts["added_tokens"])  # not searched for: see `_make_deterministic`
    )
