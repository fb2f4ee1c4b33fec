"""A handwritten schedule: printed, edited, checked, compiled and run; the run then reads it from its own folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.run.place import FOUR_RANKS, Place, spec_text
from tests.runtime.run.test_schedules import labels, lines

TWO_RANKS = dict(FOUR_RANKS, expert=1, devices=2, schedule="dualpipe")


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    place = new_place()
    place.write(TWO_RANKS)
    (place.folder / "mine").mkdir()
    printed = place.dsc("schedule", "tiny.dsc", "--format", "text").stdout
    (place.folder / "mine" / "own.schedule").write_text(edited(printed))
    text = spec_text(TWO_RANKS).replace("name = dualpipe", 'file = "mine/own.schedule"')
    (place.folder / "tiny.dsc").write_text(text)
    return place


def edited(text: str) -> str:
    """The text with each rank's last backward split, and its weight gradient moved to the end."""
    return re.sub(r"(?m)^(F.*) B(\d\.\d) (.*)$", r"\1 I\2 \3 W\2", text)


def test_a_handwritten_schedule_runs_as_written(place: Place) -> None:
    written = (place.folder / "mine" / "own.schedule").read_text()
    assert written.count("I") == written.count("W") > 2
    place.dsc("train", "tiny.dsc", "--steps", 2)
    run = place.folder / "runs" / "tiny"
    for rank, row in enumerate(written.splitlines()[1:]):
        for line in lines(run / "trace" / f"rank_{rank}.jsonl"):
            assert labels(line) == row.split()
    assert (
        (run / "schedule.txt").read_text() == (place.folder / "build" / "tiny" / "schedule.txt").read_text() == written
    )
    (place.folder / "mine" / "own.schedule").rename(place.folder / "mine" / "gone")  # the run does not need it
    try:
        (run / "report.html").unlink()
        place.dsc("report", run)
        assert (run / "report.html").is_file()
        assert "measured" in place.dsc("inspect", run).stdout
    finally:
        (place.folder / "mine" / "gone").rename(place.folder / "mine" / "own.schedule")


def test_an_edit_of_the_file_makes_the_build_stale(place: Place) -> None:
    path = place.folder / "mine" / "own.schedule"
    before = path.read_text()
    path.write_text(before.replace("# dualpipe", "# by_hand"))
    place.dsc("train", "tiny.dsc", "--steps", 1, "--out", "again")
    assert (place.folder / "again" / "schedule.txt").read_text().startswith("# by_hand ")
    path.write_text(before)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("F0.0 ", "", "rank 0, B0.0: comes before its F"),
        ("micro_batches=8", "micro_batches=9", "placement bidirectional runs it on rank 1"),
        ("ranks=2", "ranks=3", "the header says ranks=3"),
    ],
)
def test_a_file_that_cannot_run_is_refused_by_all_commands(place: Place, old: str, new: str, message: str) -> None:
    path = place.folder / "mine" / "own.schedule"
    before = path.read_text()
    path.write_text(before.replace(old, new, 1))
    try:
        for command in ("check", "compile", "train", "schedule"):
            stderr = place.dsc(command, "tiny.dsc", code=2).stderr
            assert "error[S0101]: mine/own.schedule: " in stderr and message in stderr
            assert "--> tiny.dsc:5:21" in stderr
    finally:
        path.write_text(before)


def test_a_file_of_other_sizes_is_refused(place: Place) -> None:
    stderr = place.dsc("check", "tiny.dsc", "-s", "train.batch=16", code=2).stderr
    assert "is for 8 micro-batches, but the largest step, of 16 sequences, has 16 on each data rank" in stderr


def test_smaller_steps_of_a_growing_batch_use_a_stand_in(place: Place, tmp_path: Path) -> None:
    build = tmp_path / "build"
    batch = "train.batch { from = 4, to = 8, over = 500 }"
    done = place.dsc("compile", "tiny.dsc", "-o", build, "-s", batch, "-s", "train.steps=30")
    assert "proven: 4 programs" in done.stdout  # for 4, 6 and 8 micro-batches, and the evaluation
    assert '"schedule": "zbv"' in (build / "program" / "train_4.json").read_text()
    assert '"schedule": "dualpipe"' in (build / "program" / "train_8.json").read_text()
