"""Checkpoints that are copied to other places while a run trains, and a run resumed from a copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.cli.forms import FORMS, faults
from tests.runtime.run.place import ONE_RANK, Place, bits, saved, untimed

CHECKPOINT = "checkpoint { every = 3 steps, keep = 100 }"
TWO_RANKS = dict(ONE_RANK, pipeline=2, devices=2)


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A spec for two ranks whose checkpoints are copied to a folder, and `straight`, six steps of it."""
    place = new_place()
    spec = place.write(TWO_RANKS)
    text = spec.read_text("utf-8")
    assert text.count(CHECKPOINT) == 1
    copied = 'checkpoint { every = 3 steps, keep = 100, to = [local, "slow"] }'
    spec.write_text(text.replace(CHECKPOINT, copied), "utf-8")
    place.dsc("compile", "tiny.dsc")
    done = place.dsc("train", "tiny.dsc", "--out", "straight")
    assert "checkpoints are copied to slow\n" in done.stdout
    return place


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text("utf-8").splitlines()
    of_kind = [event for event in map(json.loads, lines) if event["event"] == kind]
    assert not any(faults(event, FORMS[f"event_{kind}"]) for event in of_kind)
    return of_kind


def test_a_copy_has_the_bytes_of_the_checkpoint(place: Place) -> None:
    run, slow = place.folder / "straight", place.folder / "slow"
    assert [event["step"] for event in events(run, "copy")][-1] == 6
    for name in ("step-00000006", *(event["checkpoint"] for event in events(run, "copy"))):
        for file in (run / "checkpoints" / name).iterdir():
            assert (slow / name / file.name).read_bytes() == file.read_bytes()


def test_a_run_whose_folder_is_lost_resumes_from_the_copy(place: Place) -> None:
    """The resumed run is bit-identical to the undisturbed one."""
    run, slow = place.folder / "lost", place.folder / "slow"
    moved = place.folder / "slow of straight"
    slow.rename(moved)
    place.dsc("train", "tiny.dsc", "--out", "lost", "--steps", 3)
    assert [path.name for path in slow.iterdir()] == ["step-00000003"]
    shutil.rmtree(run)
    refused = place.dsc("train", "tiny.dsc", "--out", "lost", code=2)
    assert "slow holds step-00000003 of an earlier run: go on with --resume" in refused.stderr
    done = place.dsc("train", "tiny.dsc", "--out", "lost", "--resume")
    assert "step-00000003 is taken from slow\n" in done.stdout
    assert [(event["checkpoint"], event["place"]) for event in events(run, "restore")] == [("step-00000003", "slow")]
    assert bits(saved(run)) == bits(saved(place.folder / "straight"))
    assert untimed(run) == untimed(place.folder / "straight")[-len(untimed(run)) :]
    shutil.rmtree(slow)
    moved.rename(slow)


def test_an_unwritable_place_is_reported_and_training_continues(place: Place) -> None:
    slow = place.folder / "slow"
    moved = slow.rename(place.folder / "slow of straight")
    slow.symlink_to("mnt/slow")  # a store that is not mounted
    done = place.dsc("train", "tiny.dsc", "--out", "failing")
    run = place.folder / "failing"
    assert "step 6 was not copied to slow, the next checkpoint will be: slow: " in done.stdout + done.stderr
    assert {event["place"] for event in events(run, "copy_failed")} == {"slow"}
    assert bits(saved(run)) == bits(saved(place.folder / "straight"))
    slow.unlink()
    moved.rename(slow)


def test_a_replay_does_not_change_the_places(place: Place) -> None:
    """A replay neither copies its checkpoints nor resumes from a newer one there."""
    slow = place.folder / "slow"
    before = {path: path.stat().st_mtime_ns for path in slow.rglob("*")}
    done = place.dsc("replay", "straight", 5)
    assert "copied" not in done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in slow.rglob("*")} == before
