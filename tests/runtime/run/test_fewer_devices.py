"""`dsc train --restarts N --elastic`: a rank that cannot run is dropped, and the run continues without it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.build.build import Build
from runtime.contract import Mesh
from runtime.data.preparation import UsageError
from runtime.launch import elastic
from runtime.run.starts import FewerDevices
from runtime.system.outcome import EXIT_USAGE, Outcome
from tests.runtime.processes import is_gone, wait_for
from tests.runtime.run.place import FOUR_RANKS, Place, rows, saved
from tests.runtime.run.test_elastic import starts


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A compiled spec for four ranks."""
    place = new_place()
    place.compile(FOUR_RANKS | {"precision": "fp64"})
    return place


def test_a_rank_that_cannot_run_is_left_out(place: Place) -> None:
    """Rank 3 is killed at each start. There is no plan of this run for three devices, but one for two; the next start
    begins with all devices again."""
    run = place.folder / "run"
    words = ("--out", run, "--restarts", 1, "--elastic", "--steps", 30)
    with place.started("train", "tiny.dsc", *words) as running:
        running.wait_for_step(run, 4)

        def goes_on() -> bool:
            pid = running.ranks(run).get(3)
            if pid is not None and not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
            return starts(run)[-1] == 2

        wait_for(goes_on, "the start of two ranks")
        assert running.ends() == 0, running.stderr()
    assert "no checkpoint was saved in 1 restarts" in running.stderr() or "came again" in running.stderr()
    assert "going on without the device of rank 3\n" in running.stdout()
    assert "compiling the run for 2 of 4 devices\n" in running.stdout()
    place.dsc("train", "tiny.dsc", "--out", run, "--resume", "--steps", 33)
    assert starts(run)[-1] == 4, "the device is back"
    place.dsc("train", "tiny.dsc", "--out", "straight", "--steps", 33)
    theirs, straight = rows(run), rows(place.folder / "straight")
    assert [row["step"] for row in theirs] == list(range(1, 34))
    assert [row["loss"] for row in theirs] == pytest.approx([row["loss"] for row in straight], rel=1e-6)
    assert saved(run).meta["position"] == saved(place.folder / "straight").meta["position"], "no sample twice"


def failed(rank: int, how: str = "killed by SIGKILL") -> Outcome:
    return Outcome("failed", how, rank, 4, "F0.1")


def test_a_loss_of_nan_is_not_blamed_on_a_device(place: Place) -> None:
    fewer = FewerDevices(Build.open(place.folder / "build" / "tiny"))
    assert fewer.is_other(failed(3, "the loss of step 4 is nan"))
    assert not fewer.is_other(failed(1, "the loss of step 4 is nan"))
    assert fewer.is_other(failed(1, "killed by SIGKILL"))


def test_the_last_device_is_not_left_out(place: Place) -> None:
    build = Build.open(place.folder / "build" / "tiny")
    for ranks, is_left_out in ((2, True), (1, False)):
        fewer = FewerDevices(replace(build, plan=replace(build.plan, mesh=Mesh(pp=ranks, dp=1, ep=1, tp=1, cp=1))))
        assert fewer.is_other(failed(0)) is is_left_out


def test_no_plan_for_the_remaining_devices_is_reported(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The search goes down to one device; a temporary error ends it at once."""
    build, tried = Build.open(place.folder / "build" / "tiny"), []

    def refused(_spec: Path, on: str, _folder: Path, code: int = EXIT_USAGE) -> None:
        tried.append(on)
        raise UsageError(f"the run cannot be compiled for {on} devices:\nno degrees keep the rules there", code)

    monkeypatch.setattr(elastic, "_compile", refused)
    with pytest.raises(UsageError, match="compiled for 1x1 devices:\nno degrees") as raised:
        elastic.build_without(build, 3, tmp_path, lambda _: None)
    assert (raised.value.code, tried) == (EXIT_USAGE, ["1x3", "1x2", "1x1"])
    monkeypatch.setattr(elastic, "_compile", lambda *words: refused(*words, code=75))
    with pytest.raises(UsageError):
        elastic.build_without(build, 3, tmp_path, lambda _: None)
    assert tried[3:] == ["1x3"]


def test_a_kill_while_fewer_devices_are_planned_loses_nothing(place: Place) -> None:
    """After SIGKILL of the compiling launcher, no process is left, and the next start has all checkpoints."""
    run = place.folder / "killed"
    words = ("--out", run, "--restarts", 1, "--elastic", "--steps", 30)
    with place.started("train", "tiny.dsc", *words) as running:
        running.wait_for_step(run, 4)

        def compiles() -> bool:
            pid = running.ranks(run).get(3)
            if pid is not None and not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
            return "compiling the run" in running.stdout()

        wait_for(compiles, "the compilation for fewer devices")
        for pid in running.seen()[1:]:
            if not is_gone(pid) and b"compiler.cli.main" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        assert running.ends() != 0
    saved_step = saved(run).step
    place.dsc("train", "tiny.dsc", "--out", run, "--resume", "--steps", saved_step + 3)
    assert [row["step"] for row in rows(run)] == list(range(1, saved_step + 4))
