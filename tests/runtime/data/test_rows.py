"""Prepared conversations and their samples: kept, cut, dropped and held-out rows, against a count row by row."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.contract import ChatRecipe, DataRecipe, DataRequest
from runtime.data import tokenizer
from runtime.data.chat import RowEncoder, read_settings
from runtime.data.files import DataError
from runtime.data.prepare import PreparedFolder, prepare
from runtime.data.samples import PADDING, RowSamples
from runtime.data.shards import RowReader, RowWriter
from tests.runtime.data.chats import CHATML, PLAIN, said, write_model, write_rows

VOCAB = 400


def rows_of(count: int) -> list[dict[str, Any]]:
    """Conversations of different lengths, every seventh without an assistant, and completions."""
    rows: list[dict[str, Any]] = []
    for i in range(count):
        turns = [said("user", f"{i} plus {j}?") for j in range(1 + i % 3)]
        if i % 7:
            turns.insert(1, said("assistant", "it is " + "1" * (i % 23)))
        rows.append({"messages": turns} if i % 5 else {"prompt": f"say {i}", "completion": " yes" * (1 + i % 4)})
    return rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", CHATML)
    write_rows(tmp_path / "chat" / "one.jsonl", rows_of(40))
    write_rows(tmp_path / "chat" / "two.jsonl", rows_of(60)[40:])
    return tmp_path


@pytest.fixture
def prepared(folder: Path) -> Callable[..., PreparedFolder]:
    def run(out: str = "data", *, seed: int = 3, cache: bool = False, **more: Any) -> PreparedFolder:
        data = DataRecipe(
            "chat/*.jsonl",
            "model/tokenizer.json",
            more.get("validation", 0.25),
            more.get("chat", ChatRecipe(None, "cut")),
        )
        phases, notes = more.get("phases", []), more.get("notes", [])
        return prepare(
            DataRequest(data, VOCAB, seed),
            folder,
            folder / out,
            lambda phase, done, total: phases.append(phase),
            notes.append,
            cache=folder / "cache" if cache else None,
            resumed=more.get("resumed", ()),
        )

    return run


def encoded(folder: Path) -> dict[str, list[int]]:
    """The tokens of each row of the files, by its line."""
    path = folder / "model" / "tokenizer.json"
    settings = read_settings(ChatRecipe(None, "cut"), path, folder).to_json()
    encoder = RowEncoder(tokenizer.parse(tokenizer.read(path)), settings)
    lines = [line for file in sorted((folder / "chat").iterdir()) for line in file.read_text("utf-8").splitlines()]
    return {line: row.ids for line, row in zip(lines, encoder.encode(lines), strict=True)}


def all_rows(found: PreparedFolder, split: str) -> list[list[int]]:
    reader = RowReader(found.folder / split)
    return [reader.row(index).tolist() for index in range(reader.num_rows)]


def test_every_encoded_row_is_in_one_split(folder: Path, prepared: Callable[..., PreparedFolder]) -> None:
    data = prepared()
    sides = [all_rows(data, split) for split in ("train", "validation")]
    assert sorted(sides[0] + sides[1]) == sorted(encoded(folder).values()) and min(map(len, sides)) > 0
    facts = data.meta["splits"]
    assert [facts[name]["documents"] for name in ("train", "validation")] == [len(side) for side in sides]
    assert facts["train"]["tokens"] == sum(map(len, sides[0]))
    assert sorted(path.name for path in data.folder.iterdir()) == sorted(
        [
            "meta.json",
            *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
            *(f"{side}.{end}" for side in ("train", "validation") for end in ("bin", "idx", "loss")),
        ]
    )


def test_the_unigram_loss_covers_only_tokens_with_loss(prepared: Callable[..., PreparedFolder]) -> None:
    data = prepared()
    vocab = data.meta["tokenizer"]["vocab"]
    counts = []
    for split in ("train", "validation"):
        ids = [i for row in all_rows(data, split) for i in row if i >= 0]
        counts.append(np.bincount(ids, minlength=vocab))
    probability_V = (counts[0] + 1) / (counts[0].sum() + vocab)
    expected = -(counts[1] * np.log(probability_V)).sum() / counts[1].sum()
    assert data.meta["unigram_nats"] == pytest.approx(expected, rel=1e-12)


def test_everything_that_affects_tokens_affects_the_key(folder: Path, prepared: Callable[..., PreparedFolder]) -> None:
    first = prepared("a").folder.name
    assert prepared("b", chat=ChatRecipe(None, "drop")).folder.name == first, "the length of a sequence comes later"
    (folder / "mine.jinja").write_text(PLAIN, "utf-8")
    keys = {first, prepared("c", chat=ChatRecipe("mine.jinja", "cut")).folder.name}
    config = json.loads((folder / "model" / "tokenizer_config.json").read_text("utf-8"))
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "x"}), "utf-8")
    assert len(keys | {prepared("d").folder.name}) == 3


def test_rows_are_encoded_once_and_divided_anew(prepared: Callable[..., PreparedFolder]) -> None:
    notes: list[str] = []
    phases: list[str] = []
    first = prepared("a", cache=True)
    again = prepared("b", cache=True, notes=notes)
    assert again.reused and again.meta["sha256"] == first.meta["sha256"] and "where another run prepared it" in notes[0]
    divided = prepared("c", cache=True, seed=4, validation=0.5, phases=phases)
    alone = prepared("d", seed=4, validation=0.5)
    assert "divide" in phases and "encode" not in phases and divided.meta["sha256"] == alone.meta["sha256"]


def test_a_resumed_run_does_not_open_its_rows(folder: Path, prepared: Callable[..., PreparedFolder]) -> None:
    first = prepared()
    (folder / "chat").rename(folder / "gone")
    (folder / "model").rename(folder / "no model")
    data = prepared(resumed=[first.meta["sha256"]])
    assert data.reused and data.folder == first.folder
    with pytest.raises(DataError):
        prepared(resumed=[first.meta["sha256"]], chat=ChatRecipe("other.jinja", "cut"))


def test_prompts_that_tokenize_differently_alone_are_counted(
    folder: Path, prepared: Callable[..., PreparedFolder]
) -> None:
    assert prepared().meta["chat"]["unaligned"] == 0
    write_rows(folder / "chat" / "three.jsonl", [{"prompt": "an assist", "completion": "ant"}] * 2)
    assert prepared().meta["chat"]["unaligned"] == 2


@pytest.mark.parametrize("name", ["rows.txt", "rows.parquet"])
def test_other_files_are_refused_with_the_reason(
    folder: Path, prepared: Callable[..., PreparedFolder], name: str
) -> None:
    for path in (folder / "chat").iterdir():
        path.unlink()
    (folder / "chat" / name).write_bytes(b"PAR1")
    data = DataRecipe("chat/*", "model/tokenizer.json", 0.0, ChatRecipe(None, "cut"))
    with pytest.raises(DataError) as caught:
        prepare(DataRequest(data, VOCAB, 1), folder, folder / "data", lambda *_: None)
    assert f"{Path(name).suffix} is not one of .jsonl" in str(caught.value)
    assert ("parquet files are not read here" in str(caught.value)) == name.endswith("parquet")


# ---------------------------------------------------------------- samples


def write_shard(folder: Path, rows: Sequence[Sequence[int]]) -> Path:
    with RowWriter(folder / "train", 1000) as writer:
        for row in rows:
            writer.add(np.array(row))
    return folder


def random_rows(seed: int, count: int) -> list[list[int]]:
    """Rows of 1 to 12 tokens, ~id for tokens without loss. Some have no loss, or only on their first token."""
    source = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        ids = source.integers(0, 1000, source.integers(1, 13))
        loss = source.random(len(ids)) < source.choice([0.0, 0.2, 0.9])
        rows.append(np.where(loss, ids, ~ids).tolist())
    return [*rows, [5], [5, ~6], [~5, 6]]


@pytest.mark.parametrize("piece", [1, 7, 1 << 22])
def test_first_targets_are_found_in_pieces(tmp_path: Path, piece: int) -> None:
    rows = random_rows(1, 50)
    reader = RowReader(write_shard(tmp_path, rows) / "train")
    expected = [next((i for i, token in enumerate(row) if i and token >= 0), len(row)) for row in rows]
    assert reader.first_targets(piece).tolist() == expected
    assert [token for chunk in reader.chunks(piece) for token in chunk.tolist()] == list(chain(*rows))


@pytest.mark.parametrize("sequence", [1, 2, 5, 12, 30])
@pytest.mark.parametrize("long", ["cut", "drop"])
def test_samples_are_rows_padded_and_cut(tmp_path: Path, sequence: int, long: Any) -> None:
    rows = random_rows(2, 80)
    write_shard(tmp_path, rows)
    remaining = [row for row in rows if long == "cut" or len(row) <= sequence]
    with_target = [row for row in remaining if any(token >= 0 for token in row[1:sequence])]
    if not with_target:
        with pytest.raises(DataError, match="train: no row is left to be a sample; "):
            RowSamples(tmp_path, "train", sequence, seed=1, long=long)
        return
    samples = RowSamples(tmp_path, "train", sequence, seed=1, long=long)
    sampled = [samples.tokens(i).tolist() for i in range(samples.num_windows)]
    expected = [(row[:sequence] + [PADDING] * sequence)[:sequence] + [PADDING] * 2 for row in with_target]
    assert sorted(sampled) == sorted(expected)
    assert samples.survey.facts == {
        "rows": len(rows),
        "samples": len(with_target),
        "padding": sum(sequence - min(len(row), sequence) for row in with_target),
        "cut": sum(len(row) > sequence for row in with_target),
        "dropped": len(rows) - len(remaining),
        "without_loss": len(remaining) - len(with_target),
    }
    notes = " ".join(samples.survey.notes())
    assert all(
        (f"{samples.survey.facts[name]} of" in notes)
        for name in ("cut", "dropped", "without_loss")
        if samples.survey.facts[name]
    )
    again = [samples.tokens(i + samples.num_windows).tolist() for i in range(samples.num_windows)]
    assert sorted(again) == sorted(sampled) and (again != sampled or len(sampled) < 4), "another epoch, another order"


def test_a_shard_without_its_marks_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, random_rows(3, 5))
    (tmp_path / "train.loss").write_bytes(b"\1")
    with pytest.raises(DataError, match=r"train\.loss: not a file of \d+ bytes"):
        RowReader(tmp_path / "train")
