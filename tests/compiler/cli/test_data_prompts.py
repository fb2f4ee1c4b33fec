"""Prompts in commands: `dsc data`, `dsc check`, and the data of a run that learns from rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiler.cli.main import main
from runtime.data.shards import UNSTARTED
from tests.compiler.cli.forms import FORMS, faults, parsed
from tests.runtime.data.chats import CHATML, said, write_model, write_rows

ROOT = Path(__file__).parents[3]
Captured = pytest.CaptureFixture[str]
ROWS: list[dict[str, Any]] = [
    {"prompt": "3 + 3 =", "answer": 6, "level": "é"},
    {"prompt": [said("user", "2 + 2?")], "reward_model": {"ground_truth": "4"}},
    {"prompt": "long " * 30, "label": "x"},
]
SPEC = """\
import "specs/tiny.dsc"
run asked extends tiny {
  model = plain
  train { sequence = 64, grpo { group = 2, prompt = 40, completion = 24, rewards { right { check = exact } } } }
  data  { source = "rows.jsonl", tokenizer = "model/tokenizer.json", validation = 0%, prompts { } }
}
model plain extends tiny { mtp = none }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", CHATML)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "specs").symlink_to(ROOT / "specs")
    (tmp_path / "asked.dsc").write_text(SPEC, "utf-8")
    return tmp_path


def said_by(capsys: Captured, folder: Path, *words: str, code: int = 0) -> str:
    assert main([*words, str(folder / "asked.dsc")]) == code
    done = capsys.readouterr()
    return done.out if code == 0 else done.err


def shown(capsys: Captured, folder: Path, *words: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(said_by(capsys, folder, "data", "show", *words, "--format", "json"))
    assert faults(document, FORMS["data"]) == []
    return document


def test_a_prompt_is_shown_with_its_columns(folder: Path, capsys: Captured) -> None:
    document = shown(capsys, folder)
    assert said_by(capsys, folder, "data", "show").splitlines() == [
        f"train row 0 of 3: {len(document['tokens'])} tokens, 0 with loss",
        "",
        "<|begin|>3 + 3 =",
        "",
        'columns: {"answer": 6, "level": "é"}',
        f"1 of 3 prompts have more than `prompt = 40` tokens, and are left out; the longest has "
        f"{len(shown(capsys, folder, '--row', '2')['tokens'])}",
        f"in 1 row {UNSTARTED}",
    ]
    assert (document["fate"], document["used"], document["unaligned"]) == ("sample", len(document["tokens"]), 0)
    assert document["facts"] == {"rows": 3, "samples": 2, "dropped": 1, "padding": 0, "cut": 0, "without_loss": 0}


def test_messages_are_shown_as_the_template_writes_them(folder: Path, capsys: Captured) -> None:
    document = shown(capsys, folder, "--row", "1")
    text = "".join(token["text"] for token in document["tokens"])
    assert text == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert document["notes"][0] == 'columns: {"reward_model": {"ground_truth": "4"}, "answer": "4"}'


def test_a_dropped_prompt_is_shown_as_left_out(folder: Path, capsys: Captured) -> None:
    document = shown(capsys, folder, "--row", "2")
    assert (document["fate"], document["used"]) == ("dropped", 0)
    first = said_by(capsys, folder, "data", "show", "--row", "2").splitlines()[0]
    assert first.endswith("0 with loss; too long, left out")


def test_prompts_have_no_sequences_to_show(folder: Path, capsys: Captured) -> None:
    words = ("data", "show", "--sequence", "1")
    assert "--sequence 1: prompts are not packed: use --row 1" in said_by(capsys, folder, *words, code=2)


def test_prompts_are_prepared_before_a_run(folder: Path, capsys: Captured) -> None:
    cache = str(folder / "cache")
    words = ("data", "prepare", "--jobs", "2", "--cache", cache)
    prepared = parsed(said_by(capsys, folder, *words, "--format", "json"), "data_prepare")
    (row,) = prepared["sources"]
    assert (row["documents"], row["epochs"], row["split"]) == (3, None, "train") and not prepared["reused"]
    assert parsed(said_by(capsys, folder, *words, "--format", "json"), "data_prepare")["reused"]


@pytest.mark.parametrize(
    ("row", "has_template", "warning"),
    [
        (ROWS[0], False, ""),
        (ROWS[1], True, ""),
        (ROWS[1], False, "there is no chat template"),
        ({"question": "x"}, True, 'rows.jsonl:1: no "prompt"; there are question: write'),
    ],
)
def test_rows_that_training_would_refuse_are_a_warning(
    folder: Path, capsys: Captured, row: dict[str, Any], has_template: bool, warning: str
) -> None:
    write_rows(folder / "rows.jsonl", [row])
    if not has_template:
        (folder / "model" / "chat_template.jinja").unlink()
    stdout = said_by(capsys, folder, "check")
    assert ("warning[D0102]" in stdout) == bool(warning) and warning in stdout
    assert not warning or "asked.dsc:5:" in stdout


def test_a_source_of_tables_matches(folder: Path, capsys: Captured) -> None:
    (folder / "rows.parquet").write_bytes(b"")
    text = SPEC.replace("rows.jsonl", "rows.parquet")
    (folder / "asked.dsc").write_text(text, "utf-8")
    assert "D0101" not in said_by(capsys, folder, "check")
    (folder / "asked.dsc").write_text(SPEC.replace("rows.jsonl", "asked.dsc"), "utf-8")
    assert "warning[D0101]" in said_by(capsys, folder, "check")
