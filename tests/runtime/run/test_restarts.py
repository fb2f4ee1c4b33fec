"""`dsc train --restarts N`: real ranks are killed, stopped or fail, and the run reaches the same bits by itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.run.starts import Restarts
from runtime.system.lines import read_rows
from runtime.system.outcome import Outcome
from tests import forks
from tests.compiler.cli.forms import FORMS, faults
from tests.runtime.processes import wait_for
from tests.runtime.run.place import FOUR_RANKS, Place, bits, rows, saved, untimed

STEPS = 60
OFTEN = ("--steps", STEPS, "-s", "train.checkpoint.every=10 steps", "-s", "train.validate.every=60 steps")


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A compiled spec for four ranks, and `straight`, an undisturbed run of it."""
    place = new_place()
    place.compile(FOUR_RANKS)
    place.dsc("train", "tiny.dsc", "--out", "straight", *OFTEN)
    return place


def events(run: Path, kind: str) -> list[dict[str, object]]:
    return [dict(row) for row in read_rows(run / "events.jsonl").rows if row["event"] == kind]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_fails_twice(place: Place, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each of two failures, the ranks resume from the newest checkpoint, in the process that forked them."""
    monkeypatch.setenv(forks.RUNS_FIRST, "tests.runtime.hangs")
    run = place.folder / f"failed-{number.name}"
    with place.started("train", "tiny.dsc", "--out", run, *OFTEN, "--restarts", 1, "--hang-timeout", 3) as running:
        for failures, (rank, step) in enumerate([(2, 12), (0, 32)]):  # with a new checkpoint in between
            running.wait_for_step(run, step)
            os.kill(running.ranks(run)[rank], number)
            wait_for(lambda done=failures: len(events(run, "restart")) > done, "the restart")
        assert running.ends() == 0, running.stderr()
    restarts = events(run, "restart")
    assert not any(faults(restart, FORMS["event_restart"]) for restart in restarts)
    assert [restart["number"] for restart in restarts] == [1, 1]
    assert restarts[0]["saved_step"] < restarts[1]["saved_step"]
    assert running.stderr().count("error: rank ") == 2
    assert running.stdout().count("restart 1 of 1") == 2
    assert untimed(run) == untimed(place.folder / "straight"), "no sample twice, none left out"
    assert bits(saved(run)) == bits(saved(place.folder / "straight"))
    assert len(rows(run)) == STEPS


def test_a_restart_imports_no_torch(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python logs each executed module, in the supervisor and in all ranks."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    run = place.folder / "imports"
    words = ("--out", run, "-s", "train.checkpoint.every=10 steps", "--steps", 22, "--restarts", 1)
    with place.started("train", "tiny.dsc", *words, anew=True) as running:

        def imports() -> int:
            texts = [running.stderr(), *(log.read_text("utf-8") for log in (run / "logs").glob("*.log"))]
            lines = [line for text in texts for line in text.splitlines() if line.startswith("import time:")]
            return sum(line.rpartition("|")[2].strip() == "torch" for line in lines)

        running.wait_for_step(run, 12)
        before = imports()
        os.kill(running.ranks(run)[2], signal.SIGKILL)
        assert running.ends() == 0, running.stderr()
        assert len(events(run, "restart")) == 1
        assert before > 0, "the first start is counted"
        assert imports() == before


def failed(step: int, how: str = "killed by SIGKILL", rank: int = 1) -> Outcome:
    return Outcome("failed", how, rank, step, "F0.1")


def test_restarts_are_counted_from_the_newest_checkpoint() -> None:
    restarts = Restarts(2)
    assert restarts.refusal(failed(4), saved=3) is None
    assert restarts.refusal(failed(5), saved=3) is None
    assert restarts.number == 2
    assert restarts.refusal(failed(7), saved=6) is None
    assert restarts.number == 1
    assert restarts.refusal(failed(8), saved=6) is None
    assert "no checkpoint was saved in 2 restarts" in str(restarts.refusal(failed(9), saved=6))


def test_the_same_failure_is_not_retried_twice() -> None:
    restarts = Restarts(5)
    assert restarts.refusal(failed(4, "the loss of step 4 is nan"), saved=3) is None
    assert "came again" in str(restarts.refusal(failed(4, "the loss of step 4 is nan"), saved=3))


@pytest.mark.parametrize("outcome", [Outcome("finished"), Outcome("stopped", signal=15), Outcome("killed", signal=2)])
def test_finished_and_stopped_runs_are_not_restarted(outcome: Outcome) -> None:
    assert Restarts(3).refusal(outcome, saved=3) == ""


def test_without_restarts_nothing_is_printed() -> None:
    assert Restarts(0).refusal(failed(4), saved=3) == ""
