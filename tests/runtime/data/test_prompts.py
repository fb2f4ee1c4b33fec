"""Rows of prompts as TRL, slime and verl have them, and their tokens, which are those of `transformers`."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from runtime.contract import PromptsRecipe
from runtime.data import prompts, tables, tokenizer
from runtime.data.chat import read_settings
from runtime.data.files import DataError
from runtime.data.prompts import PromptEncoder, place_of, rows
from runtime.data.readers import SourceFile
from tests.runtime.data.chats import MESSAGES, TEMPLATES, TOKENS, TOOL, said, write_model, write_rows

KEYS = PromptsRecipe()
QUESTION = [said("system", "Be brief."), said("user", "Natalia sold 48 clips …\n\nHow many?")]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": QUESTION,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"index": 7, "split": "train"},
}


def kept(path: Path, keys: PromptsRecipe = KEYS) -> list[dict[str, Any]]:
    return [json.loads(text) for text in rows(SourceFile(path.name, path), keys)]


def lines(folder: Path, *found: dict[str, Any], name: str = "a.jsonl") -> Path:
    write_rows(folder / name, list(found))
    return folder / name


def table(path: Path, found: list[dict[str, Any]]) -> Path:
    arrow_table = pa.Table.from_pylist(found)
    if path.suffix == ".parquet":
        parquet.write_table(arrow_table, path)
    else:
        with pa.ipc.new_stream(path, arrow_table.schema) as stream:
            stream.write_table(arrow_table)
    return path


# ---------------------------------------------------------------- the kept fields of a row


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "1 + 1 =", "answer": 2, "level": "easy"}, 2),  # TRL, with any columns
        ({"prompt": QUESTION, "solution": "#### 72"}, "#### 72"),
        ({"prompt": QUESTION, "label": "72", "metadata": {"id": 3}}, "72"),  # slime
        (VERL, "72"),
        ({"prompt": "x", "ground_truth": ["a", "b"], "answer": None}, ["a", "b"]),
        ({"prompt": "x", "answer": 0, "label": 1}, 0),
        ({"prompt": "x", "answer": False}, False),
    ],
)
def test_rows_of_other_trainers_have_their_answer_and_all_columns(
    tmp_path: Path, row: dict[str, Any], answer: object
) -> None:
    (kept_row,) = kept(lines(tmp_path, row))
    columns = {name: value for name, value in row.items() if name != "prompt"}
    assert kept_row == {"prompt": row["prompt"], "columns": columns | {"answer": answer}}


def test_a_row_may_have_no_answer(tmp_path: Path) -> None:
    assert kept(lines(tmp_path, {"prompt": "x", "level": 1})) == [{"prompt": "x", "columns": {"level": 1}}]


def test_keys_name_other_columns_and_go_into_objects(tmp_path: Path) -> None:
    row = {"input": {"text": "x"}, "a.b": 3, "a": {"b": 4}, "answer": 5, "question": "y"}
    path = lines(tmp_path, row)
    (kept_row,) = kept(path, PromptsRecipe("input.text", "a.b"))
    assert kept_row == {"prompt": "x", "columns": row | {"answer": 3}}, "a column with the name itself comes first"
    (kept_row,) = kept(path, PromptsRecipe("question", "input.text"))
    assert kept_row["prompt"] == "y" and kept_row["columns"]["answer"] == "x" and "question" not in kept_row["columns"]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_tables_give_the_rows_of_lines(tmp_path: Path, suffix: str) -> None:
    rows = [VERL | {"extra_info": {"index": i, "split": "é" * i}} for i in range(150)]
    assert kept(table(tmp_path / f"a{suffix}", rows)) == kept(lines(tmp_path, *rows))


def test_compressed_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(VERL).encode()))
    assert kept(path) == kept(lines(tmp_path, VERL))


def test_values_that_json_lacks_become_text(tmp_path: Path) -> None:
    row = {
        "prompt": "x",
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "day": datetime.date(2026, 1, 2),
        "answer": decimal.Decimal("12.50"),
        "share": 0.1,
        "nothing": None,
    }
    (kept_row,) = kept(table(tmp_path / "a.parquet", [row]))
    expected = {"when": "2026-01-02T03:04:05", "day": "2026-01-02", "answer": "12.50", "share": 0.1, "nothing": None}
    assert kept_row["columns"] == expected


def test_half_of_a_surrogate_pair_is_kept_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "answer": "\\ud83d"}\n')
    assert kept(path) == [{"prompt": "x", "columns": {"answer": "\ud83d"}}]


# ---------------------------------------------------------------- bad rows


@pytest.mark.parametrize(
    ("row", "said_of_it"),
    [
        ([], 'expected an object with a prompt under "prompt"'),
        (
            {"question": "x", "answer": "y", "n": 1},
            'no "prompt"; there are question, answer: write `prompts { prompt = "question" }`',
        ),
        ({"n": 1}, 'no "prompt", and no other text or list of messages'),
        ({"prompt": None, "messages": QUESTION}, 'no "prompt"; there are messages: write'),
        ({"prompt": ""}, '"prompt" is empty'),
        ({"prompt": []}, '"prompt" is not a list of messages'),
        ({"prompt": {"role": "user"}}, '"prompt" is neither a text nor a list of messages'),
        ({"prompt": 3}, '"prompt" is neither a text nor a list of messages'),
        ({"prompt": [{"content": "x"}]}, 'a message of "prompt" is no object with a string under "role"'),
        ({"prompt": [*QUESTION, said("assistant", "x")]}, '"prompt" ends with a message of the assistant'),
        ({"prompt": QUESTION, "tools": "{"}, '"tools" is a text that is not JSON'),
        ({"prompt": QUESTION, "chat_template_kwargs": 3}, '"chat_template_kwargs" is not an object'),
    ],
)
def test_a_row_without_a_prompt_is_an_error_of_its_line(tmp_path: Path, row: Any, said_of_it: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n\n{json.dumps(row)}\n', "utf-8")
    with pytest.raises(DataError) as caught:
        kept(path)
    assert str(caught.value).startswith(f"{path}:3: {said_of_it}")


def test_a_named_answer_must_exist(tmp_path: Path) -> None:
    path = lines(tmp_path, {"prompt": "x", "answer": "y"}, {"prompt": "x", "answer": None})
    with pytest.raises(DataError, match=r'a\.jsonl:2: no "answer", which `answer` of `prompts` names'):
        kept(path, PromptsRecipe(answer="answer"))


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt"\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        kept(path)


def test_a_row_of_a_table_is_named_by_its_number(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", [{"prompt": "x"}] * 99 + [{"prompt": None}])
    with pytest.raises(DataError, match=r'a\.parquet: row 100: no "prompt"'):
        kept(path)


def test_tables_with_binary_values_are_refused(tmp_path: Path) -> None:
    image = table(tmp_path / "a.parquet", [{"prompt": "x", "images": []}, {"prompt": "x", "images": [{"b": b"\x89"}]}])
    with pytest.raises(DataError, match=r'a\.parquet: row 2: column "images" holds bytes, as of an image: leave it'):
        kept(image)
    values = pa.Array.from_buffers(pa.string(), 2, pa.array([b"good", b"\xff\xfe"]).buffers())
    parquet.write_table(pa.table({"prompt": values}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: a text of rows 1 to 2 is not UTF-8"):
        kept(tmp_path / "b.parquet")
    parquet.write_table(pa.Table.from_arrays([pa.array(["x"])] * 2, ["prompt", "prompt"]), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r'c\.parquet: several columns "prompt"'):
        kept(tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes(b"PAR1" * 10)
    with pytest.raises(DataError, match=r"d\.parquet: cannot be read as parquet"):
        kept(tmp_path / "d.parquet")


def test_a_long_row_of_a_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_DOCUMENT_BYTES", 1 << 20)
    path = table(tmp_path / "a.parquet", [{"prompt": "x"}, {"prompt": "x" * (1 << 20)}])
    with pytest.raises(DataError, match=r"a\.parquet: row 2 is longer than 1 MiB"):
        kept(path)


def test_rows_of_a_table_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary-encoded column of one text and 100,000 indices: a terabyte as texts, kilobytes as a file."""
    text = pa.array(["y" * (20 << 20)])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), text)
    parquet.write_table(pa.table({"prompt": column}), tmp_path / "a.parquet", compression="zstd")
    monkeypatch.setattr(tables, "DATA_BYTES", 1 << 29)
    with pytest.raises(DataError, match=r"a\.parquet: it needs more than 0\.5 GiB of memory"):
        kept(tmp_path / "a.parquet")


# ---------------------------------------------------------------- tokens


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Our encoder and the tokenizer of `transformers` for one template."""
    path = write_model(tmp_path_factory.mktemp(request.param), TEMPLATES[request.param])
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=TEMPLATES[request.param], **TOKENS)
    return encoder_of(path), theirs


def encoder_of(path: Path) -> PromptEncoder:
    bpe = tokenizer.parse(tokenizer.read(path))
    return PromptEncoder(bpe, read_settings(KEYS, path, path.parent).to_json())


def encode(encoder: PromptEncoder, prompt: object, **columns: Any) -> list[int]:
    (encoded,) = encoder.encode([json.dumps({"prompt": prompt, "columns": columns})])
    return encoded.ids


def conversations() -> Iterator[list[dict[str, Any]]]:
    source = random.Random(6)
    parts = ("a", "<|im_end|>", " ", "\n", "é", "東", "🗼", "x1", "'s", "<", "  ", "\t", "{{ x }}")
    for _ in range(200):
        roles = [source.choice(("system", "user", "assistant")) for _ in range(source.randrange(0, 5))]
        yield [said(role, "".join(source.choices(parts, k=source.randrange(0, 6)))) for role in (*roles, "user")]


@pytest.mark.parametrize(
    "more", [{}, {"tools": [TOOL], "chat_template_kwargs": {"bos_token": "[b]"}}], ids=["", "more"]
)
def test_messages_are_rendered_by_the_template(pair: Any, more: dict[str, Any]) -> None:
    """TRL: `apply_chat_template(…, add_generation_prompt=True)`."""
    encoder, theirs = pair
    options = {"tools": more.get("tools"), **more.get("chat_template_kwargs", {})}
    for messages in (*conversations(), *(turns for turns in MESSAGES.values() if turns[-1]["role"] == "user")):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
        assert encode(encoder, messages, **more) == expected


def test_texts_have_the_tokens_that_a_tokenizer_gives_them(pair: Any) -> None:
    """TRL: `processing_class(text=prompts)`, with the special tokens of texts."""
    encoder, theirs = pair
    for text in ("x", "Q: one and one?\nA:", "<|im_start|>user\n東<|im_end|>", " 🗼 \n", *map(chr, range(33, 700, 7))):
        assert encode(encoder, text) == theirs(text=text)["input_ids"]
        assert encode(encoder, text)[0] == theirs.bos_token_id


def test_places_point_to_the_row(tmp_path: Path) -> None:
    path = lines(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    settings = read_settings(KEYS, write_model(tmp_path / "model", None), tmp_path)
    file = SourceFile("a.jsonl", path)
    assert [place_of(settings, file, text) for text in rows(file, KEYS)] == [f"{path}:1", f"{path}:2"]
