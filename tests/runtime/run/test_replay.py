"""`dsc replay`: a repeated step is bit-identical to the run, and a changed number is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compiler.cli.forms import FORMS, faults
from tests.runtime.run.place import FOUR_RANKS, Place, rows


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A run `run` of seven steps on four ranks, with checkpoints of steps 3, 6 and 7."""
    place = new_place()
    place.compile(FOUR_RANKS)
    place.dsc("train", "tiny.dsc", "--out", "run", "--steps", 7)
    return place


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(("step", "begun"), [(5, 3), (2, 0)])
def test_a_step_has_the_bits_of_the_run(place: Place, step: int, begun: int) -> None:
    before = digests(place.folder / "run")
    document = json.loads(place.dsc("replay", "run", step, "--format", "json").stdout)
    assert faults(document, FORMS["replay"]) == []
    nothing: dict[str, list[object]] = {name: [] for name in ("differs", "ranks", "surroundings", "suspects", "faults")}
    assert document == {"version": 1, "from_step": begun, "step": step, "equal": True, "verdict": None, **nothing}
    assert digests(place.folder / "run") == before, "the run stays as it is"


def test_a_step_that_was_not_traced_is_trained_again(place: Place) -> None:
    """The new trace is of this step, on all ranks; the run is not changed."""
    traces = [place.folder / "run" / "trace" / f"rank_{rank}.jsonl" for rank in range(4)]
    texts = [path.read_text("utf-8") for path in traces]
    traced = json.loads(place.dsc("trace", "run", 5).stdout)
    for path, text in zip(traces, texts, strict=True):
        lines = [line for line in text.splitlines(keepends=True) if json.loads(line)["step"] != 5]
        path.write_text("".join(lines), "utf-8")
    assert "--again trains the step again" in place.dsc("trace", "run", 5, code=2).stderr
    before = digests(place.folder / "run")
    place.dsc("trace", "run", 5, "--again", "-o", "again.json")
    again = json.loads((place.folder / "again.json").read_text("utf-8"))
    assert digests(place.folder / "run") == before
    new, old = again["otherData"], traced["otherData"]
    assert (new["title"], new["program"], new["loss"]) == (old["title"], old["program"], old["loss"])
    named = [[(event["pid"], event["name"]) for event in trace["traceEvents"]] for trace in (traced, again)]
    assert named[0] == named[1] and {rank for rank, _ in named[0]} == {0, 1, 2, 3}
    assert all(event["dur"] >= 0 for event in again["traceEvents"] if event["ph"] == "X")
    assert "run has no row for step 8" in place.dsc("trace", "run", 8, "--again", code=2).stderr
    metrics, row = place.folder / "run" / "metrics.jsonl", rows(place.folder / "run")[4]
    text = metrics.read_text("utf-8")
    metrics.write_text(text.replace(repr(row["loss"]), repr(row["loss"] + 1)), "utf-8")
    done = place.dsc("trace", "run", 5, "--again", "-o", "other.json", code=4)
    assert "the numbers of step 5 differ from the run" in done.stderr
    assert json.loads((place.folder / "other.json").read_text("utf-8"))["traceEvents"]
    metrics.write_text(text, "utf-8")
    for path, text in zip(traces, texts, strict=True):
        path.write_text(text, "utf-8")


def test_differences_are_named(place: Place) -> None:
    metrics = place.folder / "run" / "metrics.jsonl"
    text, row = metrics.read_text("utf-8"), rows(place.folder / "run")[4]
    assert row["step"] == 5
    changed = row["loss"] * (1 + 2**-50)
    metrics.write_text(text.replace(repr(row["loss"]), repr(changed)), "utf-8")
    done = place.dsc("replay", "run", 5, "--out", "why", code=1)
    assert (
        f"steps 4 to 5: the first difference is in step 5\n  loss: {changed!r} in the run, {row['loss']!r} now"
        in done.stdout
    )
    assert "the new trainings are in why" in done.stderr
    assert rows(place.folder / "why" / "run")[-1]["loss"] == row["loss"]
    done = place.dsc("replay", "run", 5, "--out", "why", code=2)
    assert "why already exists" in done.stderr
    metrics.write_text(text, "utf-8")


def test_missing_steps_and_runs(place: Place) -> None:
    assert "run has no row for step 8: its steps are 1 to 7" in place.dsc("replay", "run", 8, code=2).stderr
    (place.folder / "run" / "events.jsonl").unlink()
    assert json.loads(place.dsc("replay", "run", 4, "--format", "json").stdout)["equal"]
    assert "there is no folder none" in place.dsc("replay", "none", 8, code=2).stderr
