"""Token ids computed by words equal the library's on every text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from runtime.data import corpus, tokenizer
from runtime.data.tokenizer import Encoder, is_byte_level, pieces

FILES = sorted(corpus.stdlib_folder().glob("*.py"))[:40]
TEXTS = [path.read_text("utf-8") for path in FILES]
BPE = tokenizer.train(TEXTS, 900)
KEPT = Encoder(BPE)

# Classes of the pattern, and corner cases: runs of spaces before a word, contractions, controls, other scripts.
PARTS = [*" \t\n\r\v\f'\"", "'s", "'ll", "'S", "  ", "\n    ", "a", "Zebra", "def", "7", "42", "_", "==", "#"]
PARTS += ["\x00", "\x1c", "\x1f", "\x7f", "\x85", "\xa0", "é", "²", "一", "\u2028", "😀", tokenizer.END]
TEXT = st.lists(st.sampled_from(PARTS) | st.characters(max_codepoint=127), max_size=40).map("".join)


@given(st.lists(TEXT, max_size=4), st.integers(1, 12))
@example(["a \n\n  b\x1c c's  \n"], 1)
def test_ids_are_the_librarys(texts: list[str], piece: int) -> None:
    """Ids are right for any text in pieces of any size, with a new encoder and with one that has seen other words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE", piece)
        assert KEPT.encode(texts) == Encoder(BPE).encode(texts) == tokenizer.encode(BPE, texts)


def test_ids_of_whole_files() -> None:
    assert KEPT.encode(TEXTS) == tokenizer.encode(BPE, TEXTS)


@given(TEXT, st.integers(1, 12))
def test_pieces_are_the_text(text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE", piece)
        found = list(pieces(text))
    assert "".join(found) == text
    assert all(len(part) >= piece and after.startswith("\n") for part, after in pairwise(found))


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MAX_HELD", 2000)
    monkeypatch.setattr(tokenizer, "PIECE", 500)
    encoder = Encoder(BPE)
    assert encoder.encode(TEXTS[:3]) == tokenizer.encode(BPE, TEXTS[:3])
    assert sum(len(word) + tokenizer.WORD_COST for word in encoder._ids) < 2000 + 500 * tokenizer.WORD_COST


OTHER = {
    "prefix space": lambda bpe: setattr(bpe, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no pattern": lambda bpe: setattr(bpe, "pre_tokenizer", pre_tokenizers.ByteLevel(False, use_regex=False)),
    "whitespace": lambda bpe: setattr(bpe, "pre_tokenizer", pre_tokenizers.Whitespace()),
    "nothing": lambda bpe: setattr(bpe, "pre_tokenizer", None),
    "lower case": lambda bpe: setattr(bpe, "normalizer", normalizers.Lowercase()),
    "a word of its own": lambda bpe: bpe.add_tokens([AddedToken("def __init__(self")]),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_tokenizers_are_the_librarys(name: str) -> None:
    bpe = Tokenizer.from_str(tokenizer.to_json(BPE))
    OTHER[name](bpe)
    assert is_byte_level(BPE) and not is_byte_level(bpe)
    assert Encoder(bpe).encode(TEXTS[:5]) == tokenizer.encode(bpe, TEXTS[:5])


def test_a_tokenizer_from_a_file_is_looked_up_too(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(BPE), "utf-8")
    assert is_byte_level(tokenizer.parse(tokenizer.read(path)))
