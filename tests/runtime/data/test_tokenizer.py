"""Byte-level BPE: exact size, exact round trip, and no document can produce the end token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data import tokenizer
from runtime.data.files import DataError

TEXTS = [f"def f{i}(x):\n    return x * {i}  # größer als {i}\n" for i in range(200)]
BPE = tokenizer.train(TEXTS, 300)
UTF8 = st.characters(exclude_categories=["Cs"])


@given(st.text(UTF8))
def test_round_trip_of_any_text(text: str) -> None:
    (ids,) = tokenizer.encode(BPE, [text])
    assert tokenizer.decode(BPE, ids) == text
    assert all(0 <= i < 300 for i in ids)


@given(st.text(UTF8, max_size=5), st.text(UTF8, max_size=5))
def test_no_document_can_write_the_end_token(before: str, after: str) -> None:
    text = before + tokenizer.END + after
    (ids,) = tokenizer.encode(BPE, [text])
    assert tokenizer.end_id(BPE) not in ids
    assert tokenizer.decode(BPE, ids) == text


def test_size_is_exact_and_order_of_the_texts_does_not_matter() -> None:
    assert tokenizer.size(BPE) == 300 and BPE.get_vocab_size() == 300
    assert BPE.token_to_id(tokenizer.END) == tokenizer.end_id(BPE) == 0
    assert tokenizer.to_json(tokenizer.train(reversed(TEXTS), 300)) == tokenizer.to_json(BPE)
    (ids,) = tokenizer.encode(BPE, [TEXTS[0]])
    assert len(ids) < len(TEXTS[0]) * 0.7  # merges are used


def test_a_vocabulary_out_of_reach_is_refused() -> None:
    with pytest.raises(DataError, match=r"train\(256\): at least 257"):
        tokenizer.train(TEXTS, 256)
    with pytest.raises(DataError, match=r"train\(4096\): the training text yields (\d+) tokens; write train\(\1\)"):
        tokenizer.train(["hello hello"], 4096)


def test_load_is_the_inverse_of_to_json(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(BPE), encoding="utf-8")
    again = tokenizer.parse(tokenizer.read(path))
    assert tokenizer.digest(again) == tokenizer.digest(BPE)
    assert tokenizer.encode(again, [tokenizer.END]) == tokenizer.encode(BPE, [tokenizer.END])


def test_load_undoes_truncation_padding_and_dropout(tmp_path: Path) -> None:
    given_ = json.loads(tokenizer.to_json(BPE))
    given_["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    given_["model"]["dropout"] = 0.5
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(given_), encoding="utf-8")
    assert tokenizer.encode(tokenizer.parse(tokenizer.read(path)), TEXTS) == tokenizer.encode(BPE, TEXTS)


def test_the_vocabulary_of_the_model_limits_the_tokenizer(prepared: Callable[..., object], spec_folder: Path) -> None:
    with pytest.raises(DataError, match=r"train\(320\): more tokens than the model's vocab = 319"):
        prepared(vocab=319)
    (spec_folder / "given.json").write_text(tokenizer.to_json(BPE), encoding="utf-8")
    with pytest.raises(DataError, match=r"given\.json: 300 tokens, more than the model's 299"):
        prepared(vocab=299, tokenizer="given.json")


def test_a_wrong_path_suggests_a_near_one(tmp_path: Path) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    right = tmp_path / "models" / "small" / "tokenizer.json"
    right.write_text("{}", "utf-8")
    for wrong in ("models/smal/tokenizer.json", "models/small/tokeniser.json", "tokenizer.json"):
        with pytest.raises(DataError, match=f"did you mean {right}"):
            tokenizer.read(tmp_path / wrong)
    with pytest.raises(DataError, match=r"No such file or directory$"):
        tokenizer.read(tmp_path / "models" / "small" / "vocab.txt")
