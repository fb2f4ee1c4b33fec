"""However a run ends, it reports exit code, rank and action, leaves no process behind, and can be resumed."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.data.shards import ShardReader
from tests import forks
from tests.runtime.processes import is_gone, wait_for
from tests.runtime.run.place import FOUR_RANKS, ONE_RANK, Place, Running, bits, rows, saved, untimed

FOREVER = ("--steps", 10**6)
BEGUN = 4  # rows after which a run is disturbed; by then it has one checkpoint, of step 3
STRAIGHT = 30

# `F1.3`, `(F0.3|B1.2)`, `dispatch I1.2@L1`, `recv F0.1`, `sum records`, `reduce experts`: actions that ranks report
ACTION = r"(\(?[FBIWE]\d+\.\d+.*|\w+ [FBIWE]\d+\.\d+.*|(?:reduce|gather|connect) .*|[a-z ]+)"


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A compiled spec for four ranks, and `straight`, an undisturbed run of it."""
    place = new_place()
    place.compile(FOUR_RANKS)
    place.dsc("train", "tiny.dsc", "--out", "straight", "--steps", STRAIGHT)
    return place


def check_resumes(place: Place, name: str) -> None:
    """Assert that three more steps from the newest checkpoint are bit-identical to the undisturbed run."""
    run, straight = place.folder / name, place.folder / "straight"
    last = saved(run).step + 3
    assert last <= STRAIGHT, "the undisturbed run must be longer"
    place.dsc("train", "tiny.dsc", "--out", name, "--resume", "--steps", last)
    *before, end = untimed(run)
    *expected, at_end = untimed(straight)[:last]
    assert before == expected and end | at_end == end, "but for a validation, which a run has at its end"
    assert bits(saved(run, last - last % 3)) == bits(saved(straight, last - last % 3))


def failure(running: Running, code: int) -> str:
    """Wait until the run has ended, with exit code `code` and no process left. Returns the line with the reason."""
    assert running.ends() == code, running.stderr()
    lines = [line for line in running.stderr().splitlines() if not line.startswith(("data: ", "  "))]
    assert len(lines) == 1, running.stderr()
    assert "Traceback" not in running.stdout() + lines[0]
    return lines[0]


# ---------------------------------------------------------------- a rank


def test_a_killed_rank(place: Place) -> None:
    run = place.folder / "killed"
    with place.started("train", "tiny.dsc", "--out", run, *FOREVER) as running:
        running.wait_for_step(run, BEGUN)
        os.kill(running.ranks(run)[2], signal.SIGKILL)
        message = failure(running, code=1)
    assert re.fullmatch(rf"error: rank 2 failed during {ACTION}, step \d+: killed by SIGKILL.*", message), message
    assert f"report: dsc report {run}" in running.stdout() and not (run / "report.html").exists(), (
        "nothing is waited for"
    )
    check_resumes(place, "killed")


def test_a_stopped_rank(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forks.RUNS_FIRST, "tests.runtime.hangs")
    run = place.folder / "stopped"
    with place.started("train", "tiny.dsc", "--out", run, *FOREVER, "--hang-timeout", 5) as running:
        running.wait_for_step(run, BEGUN)
        os.kill(running.ranks(run)[1], signal.SIGSTOP)
        message = failure(running, code=3)
    assert re.fullmatch(rf"error: rank 1 hung during {ACTION}, step \d+: .*its process is stopped", message), message
    assert running.stderr().count("\n  rank ") == 4, "what every rank waits in is said"
    assert saved(run).step >= 3


def test_an_exception_in_a_segment(place: Place) -> None:
    """Token ids outside the vocabulary appear in the training data, and the embedding raises."""
    run = place.folder / "raised"
    with place.started("train", "tiny.dsc", "--out", run, *FOREVER) as running:
        running.wait_for_step(run, BEGUN)
        data = shard(run)
        with data.open("r+b") as file:  # it must not become shorter: ranks have mapped it
            file.write(b"\xff" * data.stat().st_size)
        message = failure(running, code=1)
    location = r"rank \d failed during \(?[FB]\d\.\d.*, step \d+"
    assert re.fullmatch(rf"error: {location}: IndexError: .*", message), message
    assert "segments/embed" in running.stderr(), "the traceback shows the emitted line"
    assert saved(run).step >= 3
    place.dsc(
        "train", "tiny.dsc", "--out", run, "--resume", "--steps", saved(run).step + 1
    )  # the data is prepared again


def test_data_that_goes_away(place: Place) -> None:
    run = place.folder / "torn"
    with place.started("train", "tiny.dsc", "--out", run, *FOREVER) as running:
        running.wait_for_step(run, BEGUN)
        os.truncate(shard(run), 0)
        message = failure(running, code=1)
    assert re.fullmatch(rf"error: rank \d failed during {ACTION}, step \d+: killed by SIGBUS", message), message
    assert saved(run).step >= 3


def shard(run: Path) -> Path:
    """The token file that the ranks of a run have mapped."""
    (meta,) = (run / "data").glob("*/meta.json")
    path = meta.parent / "train.bin"
    assert path == ShardReader(meta.parent / "train").data_path
    return path


def test_a_loss_that_is_not_finite(place: Place) -> None:
    """The largest rate and decay of the language multiply the weights by -99 per step, until they overflow. All ranks
    notice at the same step, before any update; the previous checkpoint stays good."""
    place.compile(dict(FOUR_RANKS, name="absurd", rate=10, decay=10), "absurd.dsc")
    run = place.folder / "nan"
    done = place.dsc("train", "absurd.dsc", "--out", run, *FOREVER, code=1)
    line = r"^error: rank \d failed during sum norm, step (\d+): (step .*)$"
    named = re.search(line, done.stderr, re.MULTILINE)
    assert named, done.stderr
    assert named[2].startswith(f"step {named[1]}: loss ") and "; nothing was updated; " in named[2]
    logs = [(run / "logs" / f"rank_{rank}.log").read_text("utf-8") for rank in range(4)]
    assert all(f"BadStepError: {named[2]}" in log for log in logs), "every rank decided alike"
    done_steps = int(named[1]) - 1
    assert [row["step"] for row in rows(run)] == list(range(1, done_steps + 1))
    assert saved(run).step == done_steps - done_steps % 3 > 0


# ---------------------------------------------------------------- the run as a whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_a_run(place: Place, number: signal.Signals) -> None:
    name = number.name
    run = place.folder / name
    with place.started("train", "tiny.dsc", "--out", run, *FOREVER) as running:
        running.wait_for_step(run, BEGUN)
        running.process.send_signal(number)
        message = failure(running, code=128 + number)
    assert message == f"stopped: the supervisor received {name}; go on with --resume"
    assert saved(run).step == rows(run)[-1]["step"], "the last step is saved, whichever it was"
    lines = running.stdout().splitlines()
    assert lines[-2:] == [f"report: dsc report {run}", f"run: {run}"] and not (run / "report.html").exists()
    place.dsc("report", run)
    assert (run / "report.html").is_file()
    if number == signal.SIGTERM:
        check_resumes(place, name)


def test_a_killed_command_leaves_nothing(place: Place) -> None:
    run = place.folder / "orphan"
    with place.started("train", "tiny.dsc", "--out", run, *FOREVER) as running:
        running.wait_for_step(run, BEGUN)
        assert len(running.ranks(run)) == 4
        running.process.send_signal(signal.SIGKILL)
        assert running.ends() == -signal.SIGKILL
    assert saved(run).step == rows(run)[-1]["step"], "the ranks had the time to end after a whole step"


def test_a_killed_launcher_leaves_nothing(place: Place) -> None:
    """The launcher is the process between the command and the ranks."""
    run = place.folder / "headless"
    with place.started("train", "tiny.dsc", "--out", run, *FOREVER) as running:
        running.wait_for_step(run, BEGUN)
        command, launcher, *_ = running.seen()
        assert command == running.process.pid
        os.kill(launcher, signal.SIGKILL)
        message = failure(running, code=128 + signal.SIGKILL)
    assert message.startswith("error: the supervisor of the ranks was killed by SIGKILL, from outside or by the kernel")
    assert saved(run).step >= 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ended_while_the_data_is_prepared(place: Place, number: signal.Signals) -> None:
    """Encoding the standard library takes seconds; the run ends before its first step."""
    place.compile(slow_data(place, "slow"), "slow.dsc")
    run = place.folder / f"early-{number.name}"
    with place.started("train", "slow.dsc", "--out", run) as running:
        wait_for_preparation(place, run)
        assert len(running.seen()) == 3, "the command, the launcher, the preparation"
        running.process.send_signal(number)
        code = running.ends()
        assert code == (-number if number == signal.SIGKILL else 128 + number)
        assert all(map(is_gone, running.seen()))
    assert "Traceback" not in running.stderr()
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ended_while_the_spec_is_compiled(place: Place, number: signal.Signals) -> None:
    """Data is prepared meanwhile; there is no build, not even a partial one."""
    name = f"uncompiled_{number.name}"
    place.write(slow_data(place, name), f"{name}.dsc")
    run = place.folder / name
    with place.started("train", f"{name}.dsc", "--out", run, anew=True) as running:
        wait_for_preparation(place, run)
        assert len(running.seen()) == 4, "the command, the compiler, the launcher, the preparation"
        running.process.send_signal(number)
        code = running.ends()
        assert code == (-number if number == signal.SIGKILL else 128 + number)
        assert all(map(is_gone, running.seen()))
    assert running.stderr() == running.stdout() == ""
    assert not [path.name for path in place.folder.glob("build/*") if name in path.name]
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize("which", [1, 2])
def test_a_killed_compiler_or_launcher(place: Place, which: int) -> None:
    """If one is killed while both work, the other ends too."""
    name = f"bereft_{which}"
    place.write(slow_data(place, name), f"{name}.dsc")
    run = place.folder / name
    with place.started("train", f"{name}.dsc", "--out", run, anew=True) as running:
        wait_for_preparation(place, run)
        _, compiler, launcher, _ = running.seen()
        os.kill((0, compiler, launcher)[which], signal.SIGKILL)
        message = failure(running, code=128 + signal.SIGKILL)
        assert all(map(is_gone, running.seen()))
    process = ("", "the compiler", "the supervisor of the ranks")[which]
    assert message.startswith(f"error: {process} was killed by SIGKILL, ") and running.stdout() == ""
    assert not (place.folder / "build" / name).exists()


def test_a_killed_preparation_may_be_tried_again(place: Place) -> None:
    place.compile(slow_data(place, "unprepared"), "unprepared.dsc")
    run = place.folder / "unprepared"
    with place.started("train", "unprepared.dsc", "--out", run) as running:
        wait_for_preparation(place, run)
        _, _, preparation = running.seen()
        os.kill(preparation, signal.SIGKILL)
        message = failure(running, code=75)
    assert message.startswith("error: the data could not be prepared: its process was killed by SIGKILL")


def wait_for_preparation(place: Place, run: Path) -> None:
    """Wait until data is being written, to the run or to the shared cache."""
    places = (place.folder / "build" / ".data", run / "data")
    wait_for(lambda: [path for folder in places for path in folder.glob(".building-*")], "the preparation of the data")


def slow_data(place: Place, name: str) -> dict[str, Any]:
    """Settings of a spec whose data takes seconds to prepare and is not in the cache."""
    shutil.rmtree(place.folder / "build" / ".data", ignore_errors=True)
    slow = place.folder / "slow"
    slow.mkdir(exist_ok=True)
    text = (place.folder / "corpus" / "textwrap.py").read_text("utf-8")
    for index in range(2):
        (slow / f"{index}.py").write_text(text * 1000, "utf-8")
    return dict(ONE_RANK, name=name, source="slow/*.py")
