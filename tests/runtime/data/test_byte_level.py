"""Which tokenizers are byte-level BPEs, whose tokens are bytes of the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from runtime.data import corpus, tokenizer
from runtime.data.tokenizer import is_byte_level

FILES = sorted(corpus.stdlib_folder().glob("*.py"))[:40]
BPE = tokenizer.train([path.read_text("utf-8") for path in FILES], 900)
OTHER = {
    "prefix space": lambda bpe: setattr(bpe, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no pattern": lambda bpe: setattr(bpe, "pre_tokenizer", pre_tokenizers.ByteLevel(False, use_regex=False)),
    "whitespace": lambda bpe: setattr(bpe, "pre_tokenizer", pre_tokenizers.Whitespace()),
    "nothing": lambda bpe: setattr(bpe, "pre_tokenizer", None),
    "lower case": lambda bpe: setattr(bpe, "normalizer", normalizers.Lowercase()),
    "a word of its own": lambda bpe: bpe.add_tokens([AddedToken("def __init__(self")]),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_tokenizers_are_not_byte_level(name: str) -> None:
    bpe = Tokenizer.from_str(tokenizer.to_json(BPE))
    OTHER[name](bpe)
    assert is_byte_level(BPE) and not is_byte_level(bpe)


def test_a_tokenizer_from_a_file_is_byte_level(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(BPE), "utf-8")
    assert is_byte_level(tokenizer.parse(tokenizer.read(path)))
