"""Saves that are killed or fail, and which checkpoints are kept, as seen by a user of `dsc train`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.checkpoint.publish import CheckpointError, load
from runtime.contract import RunPlan
from runtime.launch import room
from runtime.launch.room import cannot_save, checkpoint_bytes
from runtime.system.outcome import EXIT_RETRY, EXIT_USAGE
from tests import progress
from tests.runtime.processes import wait_for
from tests.runtime.run.place import DSC, ONE_RANK, Place, Running, bits, rows, saved, untimed

TWO_RANKS = dict(ONE_RANK, pipeline=2, devices=2)


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A compiled spec for one rank, and `straight`, six steps of it."""
    place = new_place()
    place.compile(ONE_RANK)
    place.dsc("train", "tiny.dsc", "--out", "straight")
    return place


def renamed(place: Place, name: str, ranks: dict[str, object], **lines: str) -> str:
    """Write another spec of the place, with some lines replaced. Returns its file name."""
    path = place.write(dict(ranks, name=name), f"{name}.dsc")
    text = path.read_text("utf-8")
    for old, new in lines.items():
        old = {"checkpoint": "checkpoint { every = 3 steps, keep = 100 }", "hidden": "hidden = 16"}[old]
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text, "utf-8")
    place.dsc("compile", path.name)
    return path.name


# ---------------------------------------------------------------- a kill in the first save


def test_a_kill_in_the_first_save(place: Place) -> None:
    """After SIGKILL of all processes before the first shard is written, `--resume` and plain runs start afresh."""
    run = place.folder / "killed"
    stop = place.folder / "sitecustomize.py"  # stops the rank in the save, so that it is killed there
    stop.write_text(STOPS_IN_SAVE, "utf-8")
    environment = dict(os.environ, PYTHONPATH=str(place.folder))
    command = [word for word in DSC if word != "-P"]
    process = subprocess.Popen([*command, "train", "tiny.dsc", "--out", str(run)], cwd=place.folder, env=environment)
    try:
        wait_for((run / "in-save").exists, "the first save")
    finally:
        for pid in Running(process, place.folder).seen():
            os.kill(pid, signal.SIGKILL)
        progress.end(process)
        stop.unlink()
    names = [path.name for path in (run / "checkpoints").iterdir()]
    assert names == [".tmp-3"], "the kill has left a part of a save, and nothing else"
    wait_for(lambda: not locked(run), "the end of the ranks")
    shutil.copytree(run, place.folder / "killed, not resumed")
    done = place.dsc("train", "tiny.dsc", "--out", run, "--resume")
    assert f"{run} holds no checkpoint to go on from: starting with step 1\n" in done.stdout
    assert untimed(run) == untimed(place.folder / "straight")
    assert bits(saved(run)) == bits(saved(place.folder / "straight"))
    place.dsc("train", "tiny.dsc", "--out", "killed, not resumed")
    assert bits(saved(place.folder / "killed, not resumed")) == bits(saved(place.folder / "straight"))


STOPS_IN_SAVE = """
import os, signal, sys
def hook(event, args):
    if event == "open" and str(args[0]).startswith("shard.0") and args[2] & os.O_CREAT:
        open(os.path.join(sys.argv[sys.argv.index("--out") + 1], "in-save"), "w").close()
        signal.pause()
if "--out" in sys.argv:
    sys.addaudithook(hook)
"""


KILLS = """
import os, signal, sys, threading
count = 0
def hook(event, args):
    global count
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
        if threading.current_thread().name.startswith("checkpoint"):
            count += 1
            if count == {number}:
                os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""


@pytest.mark.parametrize("number", range(2, 34, 4))
def test_a_kill_at_any_file_of_a_save_loses_nothing(place: Place, number: int) -> None:
    """SIGKILL of the rank at a call of the writing thread: of the first save, in the background, or of the last one,
    which removes the first. The resumed run is bit-identical to the undisturbed one."""
    spec = renamed(place, f"kept_{number}", ONE_RANK, checkpoint="checkpoint { every = 3 steps, keep = 1 }")
    run = place.folder / f"killed at {number}"
    done = train_changed(place, spec, run.name, 1, KILLS.format(number=number))
    assert "killed by SIGKILL" in done.stderr
    before = [path.name for path in (run / "checkpoints").glob("step-*")]
    place.dsc("train", spec, "--out", run, "--resume")
    assert untimed(run) == untimed(place.folder / "straight")
    assert bits(saved(run)) == bits(saved(place.folder / "straight"))
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["LATEST", "step-00000006"], before


def test_in_the_background_and_at_once_the_same_bytes_are_saved(place: Place) -> None:
    spec = renamed(place, "at_once", ONE_RANK, checkpoint="checkpoint { every = 3 steps, background = false }")
    place.dsc("train", spec, "--out", "at once")
    for step in (3, 6):
        at_once, in_background = (saved(place.folder / run, step).manifest for run in ("at once", "straight"))
        assert at_once.shards == in_background.shards and at_once.serial == in_background.serial, (
            "the sha256 of every shard among them"
        )
        differs = {name for name in at_once.meta if at_once.meta[name] != in_background.meta[name]}
        assert differs == {"build", "plan"}, "what says that it is another spec"


def locked(run: Path) -> bool:
    """Whether a rank of the run is still alive."""
    import fcntl

    with (run / ".lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_resuming_without_a_checkpoint_starts_a_run(place: Place) -> None:
    done = place.dsc("train", "tiny.dsc", "--out", "new", "--resume")
    assert "new holds no checkpoint to go on from: starting with step 1\n" in done.stdout
    assert bits(saved(place.folder / "new")) == bits(saved(place.folder / "straight"))
    refused = place.dsc("train", "tiny.dsc", "--out", "new", code=2)
    assert "new holds an earlier run: go on with --resume" in refused.stderr


def test_damaged_checkpoints_are_refused_instead_of_restarting(place: Place) -> None:
    shutil.copytree(place.folder / "straight", place.folder / "damaged")
    for path in (place.folder / "damaged" / "checkpoints").glob("*/manifest.json"):
        path.write_text("{}", "utf-8")
    refused = place.dsc("train", "tiny.dsc", "--out", "damaged", "--resume", code=2)
    assert "no checkpoint is good" in refused.stderr


# ---------------------------------------------------------------- before the first step


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """Mount a small file system at `path`, which needs root."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True, capture_output=True)
    try:
        yield
    finally:
        wait_for(lambda: subprocess.run(["umount", path], check=False, capture_output=True).returncode == 0, "umount")


def can_mount(tmp: Path) -> bool:
    try:
        with small_disk(tmp / "probe", "1m"):
            return True
    except (subprocess.CalledProcessError, FileNotFoundError):
        return False


def test_a_disk_that_is_too_small_is_found_before_the_first_step(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = renamed(place, "wide", ONE_RANK, hidden="hidden = 256")
    plan = RunPlan.from_json((place.folder / "build" / "wide" / "plan.json").read_bytes())
    num_bytes = checkpoint_bytes(plan)
    assert num_bytes > 4 << 20
    if can_mount(tmp_path):
        disk = tmp_path / "disk"
        with small_disk(disk, "4m"):
            done = place.dsc("train", spec, "--out", disk / "run", code=75)
            assert re.search(r"disk/run has [34]\.\d?MB free, and 2 checkpoints of \d+\.\dMB will be", done.stderr)
            assert "Traceback" not in done.stderr and not (disk / "run" / "metrics.jsonl").exists()
    free = os.statvfs(tmp_path)
    small = os.statvfs_result((*free[:4], -(-4 * num_bytes // free.f_frsize), *free[5:]))
    monkeypatch.setattr(room.os, "statvfs", lambda _: small)
    assert cannot_save(plan, tmp_path, steps=12) is None
    assert cannot_save(plan, tmp_path, steps=11) is None  # the last step is saved, too
    message, code = cannot_save(plan, tmp_path, steps=13)
    assert "and 5 checkpoints of" in message and "free" in message and code == EXIT_RETRY
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    assert cannot_save(plan, tmp_path, steps=13) is None, "one of the five is there already"


def test_the_size_of_a_checkpoint_is_known(place: Place) -> None:
    plan = RunPlan.from_json((place.folder / "build" / "tiny" / "plan.json").read_bytes())
    checkpoint = saved(place.folder / "straight")
    num_bytes = sum(entry.num_bytes for shard in checkpoint.manifest.shards for entry in shard.entries)
    assert checkpoint_bytes(plan) == num_bytes


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(place: Place, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = place.dsc("train", "tiny.dsc", "--out", tmp_path / "file" / "run", code=2)
    assert "file" in done.stderr and "Traceback" not in done.stderr
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").touch()
    done = place.dsc("train", "tiny.dsc", "--out", run, code=2)
    assert f"{run} cannot be a run folder: Not a directory" in done.stderr and "Traceback" not in done.stderr
    plan = RunPlan.from_json((place.folder / "build" / "tiny" / "plan.json").read_bytes())
    message, code = cannot_save(plan, Path("/proc/none"), steps=1)
    assert code == EXIT_USAGE
    assert message.startswith("/proc/none: ") and message.endswith("cannot be written; name a folder with --out")


# ---------------------------------------------------------------- failing saves


FAILS = """
import errno, os, sys
real, saves = os.mkdir, []
def mkdir(path, *args, **named):
    if str(path).startswith(".tmp-"):
        saves.append(path)
        if str(path) in {steps}:
            raise OSError({error}, os.strerror({error}))
    return real(path, *args, **named)
os.mkdir = mkdir
real_open = os.open
def open_(path, flags, *args, **named):
    if str(path).startswith("shard.1") and flags & os.O_CREAT and saves_of(named) in {shards}:
        raise OSError({error}, os.strerror({error}))
    return real_open(path, flags, *args, **named)
def saves_of(named):
    return os.path.basename(os.readlink("/proc/self/fd/" + str(named["dir_fd"])))
os.open = open_
"""


def train_failing(
    place: Place, spec: str, out: str, code: int, *, error: str, steps: Collection[str], shards: Collection[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `dsc train` with saves of these steps failing, on rank 0 or in the shard of rank 1."""
    text = FAILS.format(error=f"errno.{error}", steps=sorted(steps), shards=sorted(shards))
    done = train_changed(place, spec, out, code, text)
    logs = [path.read_text("utf-8") for path in (place.folder / out / "logs").iterdir()]
    assert "Traceback" not in done.stdout + done.stderr
    assert code or not any("Traceback" in log for log in logs)
    return done


def train_changed(place: Place, spec: str, out: str, code: int, text: str) -> subprocess.CompletedProcess[str]:
    """Run `dsc train` in processes that execute `text` first."""
    (place.folder / "sitecustomize.py").write_text(text, "utf-8")
    command = [word for word in DSC if word != "-P"]
    try:
        environment = dict(os.environ, PYTHONPATH=str(place.folder))
        done = progress.run([*command, "train", spec, "--out", out], place.folder, environment)
    finally:
        (place.folder / "sitecustomize.py").unlink()
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(("error", "words"), [("ENOSPC", "No space left on device"), ("EACCES", "Permission denied")])
def test_a_save_that_fails_is_said_and_the_next_one_succeeds(place: Place, error: str, words: str) -> None:
    done = train_failing(place, "tiny.dsc", f"once {error}", 0, error=error, steps={".tmp-3"})
    line = f"step 3 was not saved, the run goes on to its next save: once {error}/checkpoints: {words}"
    assert done.stderr.count(line) == 1
    run = place.folder / f"once {error}"
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["LATEST", "step-00000006"]
    assert bits(saved(run)) == bits(saved(place.folder / "straight")) and len(rows(run)) == 6


def test_a_run_whose_last_save_fails_has_failed(place: Place) -> None:
    done = train_failing(place, "tiny.dsc", "last", 1, error="ENOSPC", steps={".tmp-6"})
    assert "error: rank 0 failed during checkpoint, step 6: last/checkpoints: No space left on device\n" in done.stderr
    assert saved(place.folder / "last").step == 3, "the checkpoint before is as it was"
    place.dsc("train", "tiny.dsc", "--out", "last", "--resume")
    assert bits(saved(place.folder / "last")) == bits(saved(place.folder / "straight"))


def test_failure_stop_ends_the_run(place: Place) -> None:
    spec = renamed(place, "strict", ONE_RANK, checkpoint="checkpoint { every = 3 steps, failure = stop }")
    done = train_failing(place, spec, "strict", 1, error="EACCES", steps={".tmp-3"})
    line = r"rank 0 failed during checkpoint, step (\d): step 3 was not saved: strict/checkpoints: Permission denied"
    assert (match := re.search(line, done.stderr)) and int(match[1]) == len(rows(place.folder / "strict")) > 3
    stops = "checkpoint { every = 3 steps, failure = stop, background = false }"
    spec = renamed(place, "strict_at_once", ONE_RANK, checkpoint=stops)
    done = train_failing(place, spec, "strict_at_once", 1, error="EACCES", steps={".tmp-3"})
    line = "error: rank 0 failed during checkpoint, step 3: strict_at_once/checkpoints: Permission denied\n"
    assert line in done.stderr and len(rows(place.folder / "strict_at_once")) == 3


def test_a_shard_of_another_rank_is_named(place: Place) -> None:
    spec = renamed(place, "two", TWO_RANKS)
    done = train_failing(place, spec, "two", 1, error="ENOSPC", steps=(), shards={".tmp-3", ".tmp-6"})
    shard = "two/checkpoints/.tmp-{}/shard.1.safetensors: No space left on device"
    assert f"step 3 was not saved, the run goes on to its next save: {shard.format(3)}" in done.stderr
    assert re.search(rf"error: rank \d failed during checkpoint, step 6: .*{re.escape(shard.format(6))}", done.stderr)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(place.folder / "two" / "checkpoints")


# ---------------------------------------------------------------- kept checkpoints


def test_the_best_and_every_nth_stay_beside_the_newest(place: Place) -> None:
    """With a rate that makes the loss grow, the best checkpoint is an early one, which is kept to the end."""
    keep = "checkpoint { every = 1 steps, keep = 2, best = 1, keep_every = 5 steps }"
    spec = renamed(place, "diverges", dict(ONE_RANK, steps=8, rate="3"), checkpoint=keep)
    place.dsc("train", spec, "--out", "diverges")
    run = place.folder / "diverges"
    losses = {row["step"]: row["validation_loss"] for row in rows(run)}
    assert len(losses) == 8, "a checkpoint that may be the best is validated"
    assert min(losses, key=losses.__getitem__) == 1 and max(losses.values()) > 2 * losses[1], "it has diverged"
    steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert steps == [1, 5, 7, 8]
    assert all(saved(run, step).meta["validation_loss"] == losses[step] for step in steps)
