"""Runs on conversations: any number of data ranks, resumes, and messages about rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from compiler.tools.inference.evaluation import loss_of
from compiler.tools.inference.loaded import load_model
from compiler.tools.inference.sources import find_source
from compiler.tools.inference.token_streams import held_out
from dsl.load import load
from runtime.data.encode import RANKS, rank
from tests.runtime.data.chats import CHATML, UNMARKED, said, write_model, write_rows
from tests.runtime.run.place import DENSE, ONE_RANK, Place, bits, saved, spec_text, untimed

SETTINGS = dict(ONE_RANK, model=DENSE, precision="fp64", steps=6)
TEXT = 'data { source = "corpus/*.py", tokenizer = train(300), validation = 30% }'
CHAT = 'data { source = "chat/*.jsonl", tokenizer = "model/tokenizer.json", validation = 30%%, chat { %s } }'
LONG, SILENT, ROWS = 4, 3, 60  # rows longer than a sequence, rows without an assistant, all rows


def written(place: Place, name: str, devices: int = 1, more: str = "long = cut", sequence: int = 32) -> Path:
    """Write a spec that trains on conversations, and its build."""
    text = spec_text(dict(SETTINGS, name=name, devices=devices))
    assert TEXT in text
    text = (
        text.replace(TEXT, CHAT % more)
        .replace("vocab = 300", "vocab = 400")
        .replace("sequence = 16", f"sequence = {sequence}")
    )
    path = place.folder / f"{name}.dsc"
    path.write_text(text, "utf-8")
    write_build(place.folder / "build" / name, compile_spec(load(path), segments=place.segments).files)
    return path


def events(run: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]
    return [row for row in rows if row["event"] == name]


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    place = new_place()
    write_model(place.folder / "model", CHATML)
    rows = [
        [said("user", f"{i}?"), said("assistant", "yes " * (40 if i < LONG else i % 4))] for i in range(ROWS - SILENT)
    ]
    rows += [[said("user", f"nobody {i}")] for i in range(SILENT)]
    write_rows(place.folder / "chat" / "rows.jsonl", [{"messages": row} for row in rows])
    written(place, "tiny")
    done = place.dsc("train", "tiny.dsc", "--out", "straight")
    (place.folder / "said").write_text(done.stdout, "utf-8")
    return place


def test_cut_and_dropped_rows_are_reported_and_recorded(place: Place) -> None:
    run = place.folder / "straight"
    train, validation = events(run, "rows")
    assert (train["split"], validation["split"]) == ("train", "validation")
    assert train["rows"] + validation["rows"] == ROWS
    assert train["cut"] + validation["cut"] == LONG and train["without_loss"] + validation["without_loss"] == SILENT
    assert all(
        event["samples"] == event["rows"] - event["without_loss"] and event["dropped"] == 0
        for event in (train, validation)
    )
    output = (place.folder / "said").read_text("utf-8")
    assert f"data: {train['cut']} of {train['rows']} train rows are longer than 32 tokens, and cut there" in output


def test_the_model_learns_its_answers(place: Place) -> None:
    losses = [row["loss"] for row in untimed(place.folder / "straight")]
    assert losses[-1] < losses[0] - 0.01


def test_an_evaluation_counts_the_tokens_of_a_validation(place: Place) -> None:
    """Rows are streams, and the assistant's tokens are targets. A validation of two batches of eight counts each of
    fewer rows once, as `dsc eval` does."""
    run = place.folder / "straight"
    source = find_source(str(run))
    assert source.data is not None
    streams = held_out(source.data, None, source.spec).ids
    assert 8 < len(streams) < 16
    loss = loss_of(load_model(source, "", average=False, progress=lambda _: None), streams, lambda _: None)
    assert loss.mean == pytest.approx(untimed(run)[-1]["validation_loss"], rel=1e-12)
    assert loss.tokens < sum(len(stream) - 1 for stream in streams)
    document = json.loads(place.dsc("eval", run, "--format", "json").stdout)
    assert document["loss"] == pytest.approx(loss.mean, rel=1e-12)
    assert document["tokens"] == sum(int((stream[1:] >= 0).sum()) for stream in streams)


def test_data_ranks_divide_the_rows(place: Place) -> None:
    """The losses of two data ranks equal those of one."""
    written(place, "two", devices=2)
    place.dsc("train", "two.dsc", "--out", "two")
    on_one, on_two = (untimed(place.folder / name) for name in ("straight", "two"))
    for a, b in zip(on_one, on_two, strict=True):
        assert a.keys() == b.keys()
        assert {name: pytest.approx(value, rel=1e-9) for name, value in a.items()} == b


def test_a_run_resumes_bit_for_bit_without_its_rows(place: Place) -> None:
    place.dsc("train", "tiny.dsc", "--out", "broken", "--steps", 3)
    (place.folder / "chat").rename(place.folder / "gone")
    try:
        done = place.dsc("train", "tiny.dsc", "--out", "broken", "--resume")
    finally:
        (place.folder / "gone").rename(place.folder / "chat")
    assert "not bit for bit" not in done.stdout + done.stderr
    assert untimed(place.folder / "broken") == untimed(place.folder / "straight")
    assert bits(saved(place.folder / "broken", 6)) == bits(saved(place.folder / "straight", 6))


def test_a_longer_sequence_continues_with_the_next_rows(place: Place) -> None:
    """A row is one sample for any sequence length, so none is repeated or skipped."""
    place.dsc("train", "tiny.dsc", "--out", "longer", "--steps", 3)
    written(place, "longer", sequence=48)
    done = place.dsc("train", "longer.dsc", "--out", "longer", "--resume", "--steps", 4)
    assert "of samples 24 to 31, which follow" in done.stdout + done.stderr


@pytest.fixture(scope="module")
def packed(place: Place) -> Place:
    """Six steps on packed rows."""
    written(place, "packed", more="pack = true", sequence=64)
    place.dsc("train", "packed.dsc", "--out", "packed")
    return place


def test_a_run_says_how_its_rows_are_packed(packed: Place) -> None:
    train, validation = events(packed.folder / "packed", "rows")
    for event in (train, validation):
        assert event["samples"] < (event["rows"] - event["without_loss"]) / 2
        assert 0 <= event["padding"] < 64 * event["samples"]
    source = find_source(str(packed.folder / "packed"))
    streams = held_out(source.data, None, source.spec).ids
    assert len(streams) == validation["rows"] - validation["without_loss"], "each row is evaluated by itself"


def test_data_ranks_divide_packed_rows(packed: Place) -> None:
    written(packed, "packed_two", devices=2, more="pack = true", sequence=64)
    packed.dsc("train", "packed_two.dsc", "--out", "packed_two")
    on_one, on_two = (untimed(packed.folder / name) for name in ("packed", "packed_two"))
    for a, b in zip(on_one, on_two, strict=True):
        assert {name: pytest.approx(value, rel=1e-9) for name, value in a.items()} == b


def test_packed_rows_resume_bit_for_bit_or_at_the_same_share_of_the_epoch(packed: Place) -> None:
    packed.dsc("train", "packed.dsc", "--out", "packed_broken", "--steps", 3)
    done = packed.dsc("train", "packed.dsc", "--out", "packed_broken", "--resume")
    assert "not bit for bit" not in done.stdout + done.stderr
    assert untimed(packed.folder / "packed_broken") == untimed(packed.folder / "packed")
    assert bits(saved(packed.folder / "packed_broken", 6)) == bits(saved(packed.folder / "packed", 6))
    written(packed, "unpacked", more="pack = false", sequence=64)
    done = packed.dsc("train", "unpacked.dsc", "--out", "packed_broken", "--resume", "--steps", 7)
    assert "rows are packed otherwise: the run goes on at the same share of the epoch" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("sequence", "said_of_it"),
    [(2, "are without a token in the first 2 that the loss is on"), (8, "are longer than 8 tokens")],
)
def test_a_run_without_usable_rows_is_refused(place: Place, sequence: int, said_of_it: str) -> None:
    written(place, "none", more="long = drop" if sequence == 8 else "long = cut", sequence=sequence)
    done = place.dsc("train", "none.dsc", "--out", f"none{sequence}", code=2)
    assert "error: " in done.stderr and "no row is left to be a sample; " in done.stderr and said_of_it in done.stderr


def test_a_template_without_marks_is_refused_at_the_row(place: Place) -> None:
    (place.folder / "unmarked.jinja").write_text(UNMARKED, "utf-8")
    written(place, "unmarked", more='template = "unmarked.jinja"')
    done = place.dsc("train", "unmarked.dsc", "--out", "unmarked", code=2)
    assert "rows.jsonl:1: " in done.stderr and "does not mark what the assistant says" in done.stderr


def test_unusable_held_out_rows_are_an_error_before_the_first_step(place: Place) -> None:
    """The only held-out row has no text of the assistant."""
    silent = (json.dumps({"messages": [said("user", f"nobody {i}")]}) for i in range(1000))
    heard = ({"messages": [said("user", f"{i}?"), said("assistant", "yes")]} for i in range(1000))
    silent_line = next(line for line in silent if rank(1, line) < 0.3 * RANKS)
    trained = [row for row in heard if rank(1, json.dumps(row)) >= 0.3 * RANKS][:20]
    write_rows(place.folder / "unheard" / "rows.jsonl", [json.loads(silent_line), *trained])
    path = written(place, "unheard")
    path.write_text(path.read_text("utf-8").replace("chat/*.jsonl", "unheard/*.jsonl"), "utf-8")
    warned = place.dsc("data", "prepare", path, "--jobs", 1)
    done = place.dsc("train", path, code=2)
    reason = "validation: no row is left to be a sample; 1 of 1 validation rows are without a token"
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert reason in line and "Traceback" not in done.stderr
    assert reason in warned.stderr and "warning: `dsc train` will refuse this data: " in warned.stderr
