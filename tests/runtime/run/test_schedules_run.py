"""`dsc train` with a V: the run's trace, across a resume; and edited builds are refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.step.trace import EVERY_ONE_TO, is_traced
from tests.runtime.run.place import FOUR_RANKS, Place
from tests.runtime.run.test_schedules import labels, lines

TWO_RANKS = dict(FOUR_RANKS, expert=1, devices=2, schedule="zbv")
STEPS = 5


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    place = new_place()
    place.compile(TWO_RANKS)
    return place


@pytest.fixture(scope="module")
def run(place: Place) -> Path:
    place.dsc("train", "--steps", 3)
    place.dsc("train", "--steps", STEPS, "--resume")
    return place.folder / "runs" / "tiny"


def test_the_trace_is_the_schedule(place: Place, run: Path) -> None:
    """Evaluations, after every third step, are not in the trace."""
    header, *planned = (place.folder / "build" / "tiny" / "schedule.txt").read_text().splitlines()
    assert header == "# zbv ranks=2 micro_batches=8 placement=v"
    for rank, row in enumerate(planned):
        trace = lines(run / "trace" / f"rank_{rank}.jsonl")
        assert [(line["step"], line["program"]) for line in trace] == [(k, "train_8") for k in range(1, STEPS + 1)]
        for line in trace:
            assert labels(line) == row.split()
    assert sorted(path.name for path in (run / "trace").iterdir()) == ["rank_0.jsonl", "rank_1.jsonl"]


def test_traces_agree_on_the_time(run: Path) -> None:
    """An action that waits for another rank ends after the awaited action has begun."""
    for ours, theirs in zip(*(lines(run / "trace" / f"rank_{rank}.jsonl") for rank in (1, 0)), strict=True):
        starts = {label: start for label, start, _ in theirs["actions"]}
        ends = {label: end for label, _, end in ours["actions"]}
        assert all(ends[f"F1.{k}"] > starts[f"F0.{k}"] for k in range(8))


def test_the_ledger_of_the_first_step_is_the_plan(run: Path) -> None:
    """Each rank's peak, replayed with its received rows, and stated by the report."""
    ledgers = [json.loads((run / "memory" / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert [(ledger["step"], ledger["program"]) for ledger in ledgers] == [(1, "train_8")] * 2
    assert "every rank matches the plan for the rows it received, to the byte" in (run / "report.html").read_text()


def test_a_long_run_leaves_a_short_trace() -> None:
    assert sum(is_traced(step) for step in range(1, 100_001)) == EVERY_ONE_TO + 11


def test_an_edited_program_is_refused(place: Place) -> None:
    """Two actions of a rank are exchanged and the manifest is rewritten to match: the certificate still fails."""
    build = place.folder / "edited"
    shutil.copytree(place.folder / "build" / "tiny", build)
    program, manifest = build / "program" / "train_8.json", build / "manifest.json"
    text = program.read_text()
    before, after = [line for line in text.splitlines() if '"F0", [' in line][:2]
    edited = text.replace(before, "@").replace(after, before).replace("@", after)
    assert edited != text
    program.write_text(edited)
    refusal = place.dsc("train", "edited", code=2).stderr
    assert "program/train_8.json is not the file that was compiled; run dsc compile again" in refusal
    entries = json.loads(manifest.read_text())
    entries["files"]["program/train_8.json"] = hashlib.sha256(edited.encode()).hexdigest()
    manifest.write_text(json.dumps(entries))
    assert place.dsc("train", "edited", code=2).stderr == (
        "error: edited does not match its proof: program/train_8.json was changed after program train_8 was proven: "
        "certificate/train_8.json is of another program/train_8.json; run dsc compile again\n"
    )
