"""Saves interrupted at every system call: a complete checkpoint is always found, and the next save succeeds."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.checkpoint import durable_files
from runtime.checkpoint.publish import CheckpointError, Publisher, RetentionPolicy, latest, load
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from tests.runtime.faulty_files import (
    BROKEN,
    NO_SPACE,
    Calls,
    Change,
    Killed,
    Recorder,
    crash_states,
    fail_from,
    kill_at,
    lay_out,
    save_all,
    synced,
)

WORLD = 2


def tensors(step: int) -> list[dict[str, Tensor]]:
    return [{f"weight/of.rank{r}": torch.full((8,), float(10 * step + r))} for r in range(WORLD)]


def found_step(folder: Path) -> int:
    """The step of the newest checkpoint. Asserts that it has the state of that step, and that none is refused."""
    checkpoint = load(folder)
    assert checkpoint.refused == ()
    for rank, shard in enumerate(tensors(checkpoint.step)):
        for name, tensor in shard.items():
            assert torch.equal(checkpoint.read([name])[name], tensor), f"rank {rank}"
    return checkpoint.step


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A folder with a checkpoint of step 1."""
    save_all(tmp_path / "one", 1, tensors(1))  # type: ignore[arg-type]
    return tmp_path / "one"


def save_two(folder: Path) -> list[BaseException | None]:
    return save_all(folder, 2, tensors(2))  # type: ignore[arg-type]


def fresh(one: Path) -> Path:
    folder = one.with_name("fresh")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(one, folder)
    return folder


def assert_next_save_succeeds(folder: Path, faulty: Callable[[Calls], Calls]) -> None:
    faulty(Calls())
    assert save_all(folder, 3, tensors(3)) == [None] * WORLD  # type: ignore[arg-type]
    assert found_step(folder) == 3
    assert sorted(p.name for p in folder.iterdir()) == ["LATEST", "step-00000003"]


def num_calls(one: Path, faulty: Callable[[Calls], Calls]) -> int:
    calls = faulty(Calls())
    assert save_two(fresh(one)) == [None] * WORLD
    assert calls.count > 30
    return calls.count


@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_at_any_call_leaves_a_checkpoint(one: Path, faulty: Callable[[Calls], Calls], torn: bool) -> None:
    steps = []
    for number in range(num_calls(one, faulty)):
        folder = fresh(one)
        faulty(Calls(kill_at(number), torn_write=number if torn else -1))
        assert any(isinstance(error, Killed) for error in save_two(folder)), number
        faulty(Calls())
        steps.append(found_step(folder))
        assert_next_save_succeeds(folder, faulty)
    assert steps == sorted(steps) and set(steps) == {1, 2}  # at one call, the rename, the new one takes over


@pytest.mark.parametrize("error", [NO_SPACE, BROKEN])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_failing_disk_is_an_error_of_all_ranks_and_the_previous_checkpoint_stays(
    one: Path,
    faulty: Callable[[Calls], Calls],
    error: int,
    lasting: bool,
    record_property: Callable[[str, object], None],
) -> None:
    failures = 0
    for number in range(num_calls(one, faulty)):
        folder = fresh(one)
        calls = faulty(Calls(fail_from(number, 10**9 if lasting else number, error)))
        raised = save_two(folder)
        assert calls.count > number or lasting
        faulty(Calls())
        if any(raised):
            failures += 1
            assert all(isinstance(exception, CheckpointError) for exception in raised), (number, raised)
            assert os.strerror(error) in "".join(str(exception) for exception in raised)
            assert found_step(folder) == 1
            assert [p.name for p in folder.glob(".tmp-*")] == []
        else:
            assert found_step(folder) == 2  # what failed came after the rename
        assert_next_save_succeeds(folder, faulty)
    assert failures > 10
    record_property("failed_saves", failures)


def test_a_rank_that_cannot_write_is_named_by_rank_0(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = durable_files.create

    def create(folder: int, name: str, chunks: object) -> tuple[int, str]:
        if name == "shard.1.safetensors":
            raise OSError(NO_SPACE, os.strerror(NO_SPACE))
        return real(folder, name, chunks)  # type: ignore[arg-type]

    monkeypatch.setattr(durable_files, "create", create)
    first, second = save_two(one)
    assert str(first) == f"rank 1 did not write its shard: {one}/.tmp-2/shard.1.safetensors: No space left on device"
    assert str(second) == f"{one}/.tmp-2/shard.1.safetensors: No space left on device"


# ---------------------------------------------------------------- loss of power


@dataclass
class Recording:
    """The calls of four saves, each of which removes its predecessor. `root`: the number of the folder."""

    recorder: Recorder
    root: int
    promised: list[int] = field(default_factory=list)  # calls after which save 1, 2, … had returned


@pytest.fixture
def recording(tmp_path: Path, faulty: Callable[[Calls], Calls]) -> Recording:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with durable_files.open_folder(folder) as opened:
        recorder = Recorder()
        recording = Recording(recorder, recorder.node(opened))
    faulty(recorder)
    for step in (1, 2, 3, 4):
        assert save_all(folder, step, tensors(step)) == [None] * WORLD  # type: ignore[arg-type]
        recording.promised.append(len(recorder.changes))
    faulty(Calls())
    return recording


def states(recording: Recording, changes: list[Change], folder: Path) -> Iterator[tuple[str, str]]:
    """Each state that a power loss may leave, and its error, or "" if all promised checkpoints are there."""
    for done, description, tree in crash_states(changes, recording.root):
        promised = sum(done >= returned for returned in recording.promised)
        lay_out(tree, folder)
        yield description, problem(folder, promised)
        shutil.rmtree(folder)


def problem(folder: Path, promised: int) -> str:
    try:
        checkpoint = latest(folder)
    except CheckpointError as error:
        return str(error)
    step = checkpoint.step if checkpoint else 0
    if step < promised:
        return f"found step {step}, the save of step {promised} had returned"
    if checkpoint and (checkpoint.refused or found_step(folder) != step):
        return f"refused {checkpoint.refused}"
    return ""


def test_a_loss_of_power_at_any_point_leaves_a_checkpoint(
    recording: Recording, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    outcomes = list(states(recording, recording.recorder.changes, tmp_path / "state"))
    assert [state for state in outcomes if state[1]] == []
    assert len(outcomes) >= 1000, len(outcomes)
    record_property("states", len(outcomes))


def test_all_files_of_a_checkpoint_are_synced_before_it_is_renamed(recording: Recording) -> None:
    changes, published = recording.recorder.changes, 0
    for position, change in enumerate(changes):
        if change.kind == "rename" and change.name.startswith(".tmp-"):
            folder = next(c.file for c in changes[:position] if c.kind == "mkdir" and c.name == change.name)
            entries = [index for index, c in enumerate(changes[:position]) if c.folder == folder]
            assert len(entries) > WORLD and all(synced(changes[:position], index, folder) for index in entries)
            published += 1
    assert published == len(recording.promised)


@pytest.mark.parametrize("forgotten", ["files", "the checkpoint", "the folder of checkpoints"])
def test_that_loss_would_be_noticed(recording: Recording, tmp_path: Path, forgotten: str) -> None:
    """Without one kind of sync, the test above finds states in which a checkpoint is lost."""
    changes = recording.recorder.changes
    folders = {c.folder for c in changes}

    def kind(node: int) -> str:
        if node == recording.root:
            return "the folder of checkpoints"
        return "the checkpoint" if node in folders else "files"

    without = [replace(c, file=0) if c.kind == "sync" and kind(c.file) == forgotten else c for c in changes]
    assert any(wrong for _, wrong in states(recording, without, tmp_path / "state"))


# ---------------------------------------------------------------- real processes


@pytest.mark.parametrize(("victim", "number"), [(0, 0), (0, 9), (1, 2), (0, 16), (0, 25)])
def test_sigkill_of_a_rank_in_a_save(tmp_path: Path, victim: int, number: int) -> None:
    folder = tmp_path / "checkpoints"

    def killing(now: int, _name: str) -> None:
        if now >= number:
            os.kill(os.getpid(), signal.SIGKILL)

    def target(rank: int, world: int, board: Board, fault: bool) -> None:
        for step in (1, 2) if fault else (3,):
            board.start_step(step)
            board.set_action("checkpoint")
            if fault and step == 2 and rank == victim:
                durable_files.os = Calls(killing)  # type: ignore[assignment]
            Publisher(folder, rank, world, dist.barrier, RetentionPolicy(1)).save(step, tensors(step)[rank], {})

    outcome = launch(lambda *a: target(*a, fault=True), WORLD, folder=tmp_path)
    assert (outcome.kind, outcome.rank, outcome.step, outcome.action) == ("failed", victim, 2, "checkpoint")
    assert found_step(folder) in (1, 2)
    assert launch(lambda *a: target(*a, fault=False), WORLD, folder=tmp_path).ok
    assert found_step(folder) == 3
    assert sorted(p.name for p in folder.iterdir()) == ["LATEST", "step-00000003"]
