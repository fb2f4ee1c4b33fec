"""`dsc data show`: a row with its loss mask, its samples, and the totals over all rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiler.cli.main import main
from runtime.data.shards import UNALIGNED, UNSTARTED
from tests.compiler.cli.forms import FORMS, faults
from tests.runtime.data import megatron
from tests.runtime.data.chats import CHATML, said, write_model, write_rows

ROOT = Path(__file__).parents[3]
Captured = pytest.CaptureFixture[str]
ROWS = [
    {"messages": [said("user", "東?\x1b[2J"), said("assistant", "東京"), said("user", "so?")]},
    {"messages": [said("user", "nobody")]},
    {"messages": [said("user", "a"), said("assistant", "word " * 60)]},
    {"prompt": "an assist", "completion": "ant"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    write_model(folder / "model", CHATML)
    write_rows(folder / "chat" / "rows.jsonl", ROWS)
    text = (ROOT / "specs" / "tiny.dsc").read_text("utf-8")
    (folder / "text.dsc").write_text(text, "utf-8")
    before, _, after = text.partition("  data {")
    data = '  data { source = "chat/*.jsonl", tokenizer = "model/tokenizer.json", chat { } }'
    (folder / "chat.dsc").write_text(before + data + after.partition("}")[2], "utf-8")
    return folder


def show(capsys: Captured, folder: Path, *words: str, spec: str = "chat.dsc", code: int = 0) -> str:
    assert main(["data", "show", str(folder / spec), "-s", "train.sequence=64", *words]) == code
    done = capsys.readouterr()
    return done.out if code == 0 else done.err


def document(capsys: Captured, folder: Path, *words: str, spec: str = "chat.dsc") -> dict[str, Any]:
    report: dict[str, Any] = json.loads(show(capsys, folder, *words, "--format", "json", spec=spec))
    assert faults(report, FORMS["data"]) == []
    return report


def test_brackets_enclose_tokens_with_loss(folder: Path, capsys: Captured) -> None:
    assert show(capsys, folder).splitlines() == [
        f"train row 0 of 4: {len(document(capsys, folder)['tokens'])} tokens, 7 with loss",
        "",
        "<|im_start|>user",
        "東?␛[2J<|im_end|>",
        "<|im_start|>assistant",
        "⟦東京<|im_end|>⟧",
        "<|im_start|>user",
        "so?<|im_end|>",
        "",
        "",
        "1 of 4 train rows are longer than 64 tokens, and cut there",
        "1 of 4 train rows are without a token in the first 64 that the loss is on, and left out",
        f"in 1 row {UNALIGNED}",
        f"in 3 rows {UNSTARTED}",
    ]


def test_a_truncated_row_shows_where_it_is_cut(folder: Path, capsys: Captured) -> None:
    report = document(capsys, folder, "--row", "2")
    assert (report["fate"], report["used"]) == ("cut", 64) and len(report["tokens"]) > 64
    stdout = show(capsys, folder, "--row", "2")
    assert f"-- cut here: {len(report['tokens']) - 64} tokens are not trained on --" in stdout
    assert stdout.count("⟦") == stdout.count("⟧") == 2


def test_json_has_each_token_and_the_fate_of_rows(folder: Path, capsys: Captured) -> None:
    report = document(capsys, folder, "--row", "3")
    assert "".join(token["text"] for token in report["tokens"] if token["loss"]) == "assistant<|im_end|>"
    assert "".join(token["text"] for token in report["tokens"]) == "<|begin|>an assistant<|im_end|>"
    lengths = [len(document(capsys, folder, "--row", str(row))["tokens"]) for row in (0, 2, 3)]
    padding = sum(64 - min(64, length) for length in lengths)
    assert report["facts"] == {"rows": 4, "samples": 3, "padding": padding, "cut": 1, "dropped": 0, "without_loss": 1}
    assert (report["unaligned"], report["fate"], report["used"]) == (1, "sample", len(report["tokens"]))
    assert document(capsys, folder, "--row", "1")["fate"] == "without_loss"
    dropped = document(capsys, folder, "--row", "2", "-s", "data.chat.long=drop")
    assert (dropped["fate"], dropped["used"]) == ("dropped", 0) and dropped["facts"]["dropped"] == 1


def test_a_window_of_text_has_loss_everywhere(folder: Path, capsys: Captured) -> None:
    (folder / "text.txt").write_text("two words and more. " * 400, "utf-8")
    words = (
        "-s",
        'data.source="text.txt"',
        "-s",
        "data.tokenizer=train(260)",
        "-s",
        "data.validation=0%",
        "--row",
        "2",
    )
    report = document(capsys, folder, *words, "-s", "train.validate=none", spec="text.dsc")
    assert len(report["tokens"]) == 64 and all(token["loss"] for token in report["tokens"]) and report["facts"] is None


PLAIN = ("-s", "data.tokenizer=train(257)", "-s", "data.validation=0%", "-s", "train.validate=none")  # a token a byte


@pytest.mark.parametrize("words", [("--row",), ("-s", "data.documents=masked", "--sequence")])
def test_only_windows_that_are_trained_on_are_shown(folder: Path, capsys: Captured, words: tuple[str, ...]) -> None:
    """The last window of a sequence needs two more tokens as targets: 193 tokens give two windows."""
    (folder / "193.txt").write_text("x" * 192, "utf-8")
    words = (*PLAIN, "-s", 'data.source="193.txt"', *words)
    show(capsys, folder, *words, "1", spec="text.dsc")
    assert "the train split has 2 " in show(capsys, folder, *words, "2", spec="text.dsc", code=2)


PACK = ("-s", "data.chat.pack=true", "-s", "train.sequence=96")


def test_a_sequence_of_packed_rows_shows_each_with_its_positions(folder: Path, capsys: Captured) -> None:
    rows = [document(capsys, folder, "--row", str(row))["tokens"] for row in (0, 3)]
    report = json.loads(show(capsys, folder, *PACK, "--sequence", "1", "--format", "json"))
    assert faults(report, FORMS["data_sequence"]) == []
    assert (report["sequence"], report["sequences"], report["facts"]["samples"]) == (1, 2, 2)
    assert [(part["row"], part["first"]) for part in report["documents"]] == [(0, 0), (3, len(rows[0]))]
    assert [part["tokens"] for part in report["documents"]] == rows
    assert report["padding"] == 96 - len(rows[0]) - len(rows[1])
    lines = show(capsys, folder, *PACK, "--sequence", "1").splitlines()
    assert lines[0] == (
        f"train sequence 1 of 2: 2 documents, {96 - report['padding']} tokens, "
        f"{sum(token['loss'] for row in rows for token in row)} with loss, {report['padding']} of padding"
    )
    assert f"-- row 3 from token {len(rows[0])} on, positions 0 to {len(rows[1]) - 1} --" in lines
    assert any(line.startswith("3 train rows are packed into 2 sequences; ") for line in lines)


def test_a_sequence_of_masked_text_shows_its_documents(folder: Path, capsys: Captured) -> None:
    rows = [{"text": "two words and more. " * (1 + i % 3)} for i in range(60)]
    write_rows(folder / "texts.jsonl", rows)
    words = ["-s", 'data.source="texts.jsonl"', "-s", "data.tokenizer=train(260)", "-s", "data.validation=0%"]
    words += ["-s", "train.validate=none", "-s", "data.documents=masked", "--sequence", "1", "--format", "json"]
    report = json.loads(show(capsys, folder, *words, spec="text.dsc"))
    assert faults(report, FORMS["data_sequence"]) == [] and report["facts"] is None and report["padding"] == 0
    parts = report["documents"]
    assert sum(len(part["tokens"]) for part in parts) == 64 and len(parts) > 1
    assert [part["row"] for part in parts] == list(range(parts[0]["row"], parts[0]["row"] + len(parts)))
    assert all(token["loss"] for token in parts[0]["tokens"]), "it began in the sequence before"
    for part in parts[1:]:
        assert [token["loss"] for token in part["tokens"]] == [False] + [True] * (len(part["tokens"]) - 1)


def test_ids_without_a_tokenizer_are_numbers(folder: Path, capsys: Captured) -> None:
    """For a window, and for a sequence with separated documents."""
    megatron.write(folder / "ids", [[[*range(1, 100), 0]], [[*range(100, 150), 0]]], "int32")
    before, _, after = (folder / "text.dsc").read_text("utf-8").partition("  data {")
    data = '  data { source = "ids", end_id = 0, validation = 0%, documents = masked }'
    (folder / "ids.dsc").write_text(before + data + after.partition("}")[2], "utf-8")
    words = ("-s", "train.validate=none")
    assert show(capsys, folder, *words, spec="ids.dsc").splitlines()[2] == f"⟦{' '.join(map(str, range(1, 65)))} ⟧"
    assert document(capsys, folder, *words, spec="ids.dsc")["tokens"][0] == {"id": 1, "text": None, "loss": True}
    report = json.loads(show(capsys, folder, *words, "--sequence", "1", "--format", "json", spec="ids.dsc"))
    assert faults(report, FORMS["data_sequence"]) == []
    assert [part["tokens"][0]["id"] for part in report["documents"]] == [65, 100]


@pytest.mark.parametrize(
    ("words", "said_of_it"),
    [
        (("--sequence", "0"), "sequences do not separate documents; `pack = true` in `chat` turns that on"),
        ((*PACK, "--sequence", "2"), "--sequence 2: the train split has 2 sequences, 0 to 1"),
        ((*PACK, "--sequence", "0", "--row", "0"), "--row and --sequence exclude each other"),
        (("--row", "4"), "--row 4: the train split has 4 rows, 0 to 3"),
        (("--row", "-1"), "--row -1: the train split has 4 rows"),
        (("--split", "validation"), "--row 0: the validation split has 0 rows"),
        (("-s", 'data.chat.template="none.jinja"'), "none.jinja: cannot be read: No such file"),
        (("-s", 'data.source="none/*.jsonl"'), "data source 'none/*.jsonl': no .jsonl, .jsonl.gz, .jsonl.zst file"),
    ],
)
def test_invalid_rows_and_sequences_are_refused(
    folder: Path, capsys: Captured, words: tuple[str, ...], said_of_it: str
) -> None:
    assert said_of_it in show(capsys, folder, *words, code=2)


def test_writes_nothing_outside_the_cache(folder: Path, capsys: Captured, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    show(capsys, folder, "--cache", str(tmp_path / "cache"))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    (meta,) = (tmp_path / "cache" / "data").glob("*/meta.json")
    inode = meta.stat().st_ino
    show(capsys, folder, "--cache", str(tmp_path / "cache"), "--row", "1")
    assert meta.stat().st_ino == inode
