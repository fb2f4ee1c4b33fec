"""`schedule { host_copies = true }`: a spec is searched, compiled, trained, killed and resumed, with the numbers of
the same spec without copies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from unittest import mock

import pytest

from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import has_copies
from tests.reliability.injected import Fault, Note
from tests.runtime.run.place import FOUR_RANKS, Place, bits, saved, spec_text, untimed

COPIED = dict(FOUR_RANKS, expert=1, devices=2, precision="fp64", name="copied")
COPIED |= {"schedule": "auto, placement = v, cap = 1, host_copies = true"}


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """Runs of one schedule: with the copies that `auto` placed, and from its file without them."""
    place = new_place()
    schedule = (place.compile(COPIED, "copied.dsc") / "schedule.txt").read_text("utf-8")
    (place.folder / "plain.schedule").write_text(re.sub(r" ?[OR]\d+\.\d+", "", schedule), "utf-8")
    text = spec_text(COPIED | {"name": "plain"}).replace(f"name = {COPIED['schedule']}", 'file = "plain.schedule"')
    (place.folder / "plain.dsc").write_text(text, "utf-8")
    place.dsc("compile", "plain.dsc")
    place.dsc("train", "plain.dsc", "--out", "straight")
    return place


def test_a_kill_while_an_activation_is_on_the_host(place: Place) -> None:
    """The resumed run's losses and checkpoints are bit-identical to the run without copies."""
    printed = place.dsc("schedule", "copied.dsc").stdout
    assert has_copies(Schedule.from_text(printed))
    straight, run, note = place.folder / "straight", place.folder / "killed", place.folder / "note"
    assert not has_copies(Schedule.from_text((straight / "schedule.txt").read_text()))
    fault = mock.patch.dict(os.environ, Fault("R", "SIGKILL", (0,), str(note)).environment())
    with fault, place.started("train", "copied.dsc", "--out", run) as running:
        assert running.ends() == 1
    assert Note.read(note).action.startswith("R"), "it was about to come back"
    assert "killed by SIGKILL" in running.stderr()
    place.dsc("train", "copied.dsc", "--out", run, "--resume")
    assert (run / "schedule.txt").read_text() == printed
    assert untimed(run) == untimed(straight)
    assert bits(saved(run)) == bits(saved(straight))
