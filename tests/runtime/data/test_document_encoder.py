"""Documents have the ids of `tokenizers`, whichever library encodes them."""

from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from runtime.data import document_encoder, tokenizer
from runtime.data.document_encoder import DocumentEncoder

# The patterns of published tokenizers: by their pre_tokenizer in tokenizer.json.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA, QWEN = rf"{CONTRACTIONS}\p{{N}}{{1,3}}{REST}", rf"{CONTRACTIONS}\p{{N}}{REST}"
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
    "\r\n"
    r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["
    "\r\n"
    r"]*|\s*["
    "\r\n"
    r"]+|\s+(?!\S)|\s+",
)
PATTERNS: dict[str, tuple[str, ...]] = {"gpt2": (), "llama3": (LLAMA,), "qwen2": (QWEN,), "deepseek-v3": DEEPSEEK}
OTHER = (r"\w+|\W",)
VOCAB = 2000


@cache
def sources() -> tuple[str, ...]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return tuple((folder / name).read_text("utf-8") for name in ("typing.py", "textwrap.py", "heapq.py", "random.py"))


@cache
def trained(patterns: tuple[str, ...], normalizer: bool = False) -> str:
    bpe = Tokenizer(models.BPE())
    split = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*split, level]) if patterns else level
    bpe.decoder = decoders.ByteLevel()
    if normalizer:
        bpe.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[tokenizer.END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([*sources(), "中文 ひらがな naïve Straße 123 ½ " * 50], trainer)
    bpe.add_special_tokens([AddedToken("<|im_start|>", special=True)])
    bpe.add_tokens([AddedToken("<think>", special=False)])
    text: str = bpe.to_str()
    return text


def opened(patterns: tuple[str, ...], normalizer: bool = False) -> Tokenizer:
    return tokenizer.parse(trained(patterns, normalizer).encode())


def texts(count: int, seed: int) -> list[str]:
    """Random texts: of any characters, of few, of words, of sources, and with added tokens in them."""
    draw = random.Random(seed)
    ranges = ((0x20, 0x7F), (0xA0, 0x2FFF), (0x3040, 0x9FFF), (0xAC00, 0xD7A4), (0x1F300, 0x1FAFF), (0, 0x20))
    added = (tokenizer.END, "<|im_start|>", "<think>", "<thi", "nk>")

    def text() -> str:
        kind, length = draw.randrange(5), draw.randrange(80)
        if kind == 0:
            return "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(length))
        if kind == 1:
            return "".join(draw.choice("ab'sS \t\n\r19é\u0301中.-_") for _ in range(length))
        if kind == 2:
            return draw.choice(" \n-a0") * draw.randrange(400)
        if kind == 3:
            source = draw.choice(sources())
            start = draw.randrange(len(source))
            return source[start : start + 10 * length]
        return "".join(draw.choice((*added, " ", "x", "7", "\n")) for _ in range(length // 4))

    return [text() for _ in range(count)]


def assert_equal(found: Sequence[np.ndarray[Any, Any]], bpe: Tokenizer, given: Sequence[str]) -> None:
    for ids, expected, text in zip(found, tokenizer.encode(bpe, given), given, strict=True):
        assert ids.dtype == np.int64 and ids.tolist() == expected, repr(text)


@pytest.mark.parametrize("name", PATTERNS)
def test_published_patterns_are_fast_and_equal(name: str) -> None:
    bpe = opened(PATTERNS[name])
    encoder = DocumentEncoder(bpe)
    assert encoder.is_fast
    for seed in range(4):
        given = texts(2000, seed)
        assert_equal(encoder.encode(given), bpe, given)
    assert encoder.is_fast and encoder.encode([]) == []
    assert_equal(encoder.encode(sources()), bpe, sources())


@pytest.mark.parametrize("normalizer", [False, True])
@pytest.mark.parametrize("patterns", [OTHER, LLAMA])
def test_other_tokenizers_are_equal(patterns: tuple[str, ...], normalizer: bool) -> None:
    patterns = patterns if isinstance(patterns, tuple) else (patterns,)
    bpe = opened(patterns, normalizer)
    encoder, given = DocumentEncoder(bpe), texts(2000, 9)
    assert_equal(encoder.encode(given), bpe, given)
    assert patterns != OTHER or not encoder.is_fast


def test_a_token_of_its_own_is_parsed_and_a_special_one_is_text() -> None:
    bpe = opened(())
    special, added = (bpe.token_to_id(token) for token in (tokenizer.END, "<think>"))
    (ids,) = DocumentEncoder(bpe).encode([f"{tokenizer.END}<think>"])
    assert special not in ids and added in ids


@pytest.mark.parametrize("at", ["the start", "the first documents"])
def test_a_library_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    bpe = opened(())
    right = document_encoder._fast(bpe)
    assert right is not None
    wrong_on = document_encoder.HARD_TEXTS[3] if at == "the start" else "one document"

    def fast(given: Sequence[str]) -> list[document_encoder.Ids]:
        return [ids[::-1] if text == wrong_on else ids for text, ids in zip(given, right(given), strict=True)]

    monkeypatch.setattr(document_encoder, "_fast", lambda _: fast)
    encoder = DocumentEncoder(bpe)
    assert encoder.is_fast == (at != "the start")
    given = ["another", "one document", "a third"]
    assert_equal(encoder.encode(given), bpe, given)
    assert not encoder.is_fast


def test_a_library_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        """As Rust's, no Exception."""

    bpe = opened(())
    right = document_encoder._fast(bpe)
    assert right is not None

    def fast(given: Sequence[str]) -> list[document_encoder.Ids]:
        if "one document" in given:
            raise PanicError
        return right(given)

    monkeypatch.setattr(document_encoder, "_fast", lambda _: fast)
    encoder = DocumentEncoder(bpe)
    assert_equal(encoder.encode(["one document"]), bpe, ["one document"])
    assert not encoder.is_fast


def test_the_library_is_loaded_anew_as_its_memory_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    bpe, loaded, load = opened(()), list[Tokenizer](), document_encoder._fast

    def counted(given: Tokenizer) -> document_encoder.Encode | None:
        loaded.append(given)
        return load(given)

    monkeypatch.setattr(document_encoder, "_fast", counted)
    monkeypatch.setattr(document_encoder, "RENEWED_AFTER", 1000)
    encoder = DocumentEncoder(bpe)
    for _ in range(6):
        assert_equal(encoder.encode(["a" * 600]), bpe, ["a" * 600])
    assert len(loaded) == 1 + 2 and encoder.is_fast


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    bpe = opened(())
    encoder = DocumentEncoder(bpe)
    assert not encoder.is_fast
    assert_equal(encoder.encode(sources()), bpe, sources())
