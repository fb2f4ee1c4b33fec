"""`schedule { host_copies = true }`: a spec alone, searched, compiled, trained, killed and resumed, with the numbers of
the same spec without copies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from compiler.schedules.schedule import Schedule
from compiler.schedules.simulate import has_copies
from tests.reliability.injected import Fault, Note
from tests.runs.place import FOUR_RANKS, Place, bits, saved, spec_text, untimed

COPIED = dict(FOUR_RANKS, expert=1, devices=2, precision="fp64", name="copied")
COPIED |= {"schedule": "auto, placement = v, cap = 1, host_copies = true"}


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """Runs of one order: with the copies that `auto` placed, and as a file of it without them."""
    place = new_place()
    schedule = (place.compile(COPIED, "copied.dsc") / "schedule.txt").read_text("utf-8")
    (place.folder / "plain.schedule").write_text(re.sub(r" ?[OR]\d+\.\d+", "", schedule), "utf-8")
    text = spec_text(COPIED | {"name": "plain"}).replace(f"name = {COPIED['schedule']}", 'file = "plain.schedule"')
    (place.folder / "plain.dsc").write_text(text, "utf-8")
    place.dsc("compile", "plain.dsc")
    place.dsc("train", "plain.dsc", "--out", "straight")
    return place


def check_equal(place: Place, run: Path) -> None:
    """Losses and every bit of the checkpoints are those of the run without copies."""
    straight = place.folder / "straight"
    assert untimed(run) == untimed(straight)
    assert bits(saved(run)) == bits(saved(straight))


def test_numbers_are_those_without_copies(place: Place) -> None:
    place.dsc("train", "copied.dsc", "--out", "whole")
    check_equal(place, place.folder / "whole")
    printed = place.dsc("schedule", "copied.dsc").stdout
    assert has_copies(Schedule.from_text(printed))
    assert (place.folder / "whole" / "schedule.txt").read_text() == printed
    assert not has_copies(Schedule.from_text((place.folder / "straight" / "schedule.txt").read_text()))


def test_a_kill_while_an_activation_is_on_the_host(place: Place) -> None:
    note = place.folder / "note"
    fault = mock.patch.dict(os.environ, Fault("R", "SIGKILL", (0,), str(note)).environment())
    with fault, place.started("train", "copied.dsc", "--out", "killed") as running:
        assert running.ends() == 1
    assert Note.read(note).action.startswith("R"), "it was about to come back"
    assert "killed by SIGKILL" in running.stderr()
    place.dsc("train", "copied.dsc", "--out", "killed", "--resume")
    check_equal(place, place.folder / "killed")
