"""Saves in the background: the training thread only copies, kills lose nothing, and failures reach all ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from runtime.checkpoint import durable_files, publish
from runtime.checkpoint.copies import Copier, CopyResult
from runtime.checkpoint.publish import CheckpointError, TensorPart, load
from runtime.contract.recipe import Checkpoints
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.observe.events import Events
from runtime.observe.health.judge import RecentSteps
from runtime.run.saves import Saves
from runtime.state import snapshot
from runtime.step.trainer import Trainer
from tests.runtime.faulty_files import NO_SPACE, Calls


@dataclass
class FakeTrainer:
    """The parts of a trainer that saves use: a step, and one tensor, of which this rank has one element range."""

    rank: int
    world: int
    spec: Checkpoints
    board: Any = field(default_factory=lambda: SimpleNamespace(set_action=lambda _: None))
    step: int = 0
    watch: Any = field(default_factory=lambda: SimpleNamespace(recent=RecentSteps()))
    loads: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = torch.zeros(1000)
        self.plan = SimpleNamespace(train=SimpleNamespace(checkpoint=self.spec))
        self.position = SimpleNamespace(to_json=lambda: {"tokens": self.step})

    state = property(lambda self: self)

    def settle(self) -> None:
        """Do nothing: no transfer is in progress."""

    def train(self) -> None:
        """Run a step, which changes all weights in place."""
        self.step += 1
        self.weights += 1

    def held(self) -> dict[str, Tensor | TensorPart]:
        return {
            "weight/w": TensorPart(self.weights, 1000 * self.rank, (1000 * self.world,)),
            f"bias/b{self.rank}": torch.full((3,), float(self.step)),
        }


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "take", lambda state, plan, rank: state.held())


@dataclass
class Run:
    """Saves of one rank of a fake run, and its messages."""

    saves: Saves
    trainer: FakeTrainer
    folder: Path
    said: list[str]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.trainer.train()

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def run_of(folder: Path, rank: int = 0, world: int = 1, board: Board | None = None, **spec: Any) -> Run:
    folder.mkdir(exist_ok=True)
    usual: dict[str, Any] = {"every": 1, "keep": 100, "best": 0, "keep_every": None, "failure": "continue"}
    trainer = FakeTrainer(rank, world, Checkpoints(**usual | spec))
    trainer.board = board or trainer.board
    messages: list[str] = []
    saves = Saves(cast(Trainer, trainer), world, folder, {"of": "test"}, Events(folder), messages.append)
    return Run(saves, trainer, folder, messages)


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Block the writing of shards until the event is set."""
    free, create = threading.Event(), durable_files.create

    def waiting(*args: Any) -> tuple[int, str]:
        free.wait()
        return create(*args)

    with monkeypatch.context() as patched:
        patched.setattr(durable_files, "create", waiting)
        try:
            yield free
        finally:
            free.set()


def wait_until_over(run: Run) -> bool:
    """The result of the first `poll` after the end of the save."""
    begun = run.saves._begun
    assert begun is not None
    wait([begun.written])
    return run.saves.poll()


# ---------------------------------------------------------------- written data


def test_a_save_is_not_affected_by_later_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    run.train(1)
    with held_up(monkeypatch):
        run.saves.save(None, last=False)
        for _ in range(5):
            run.train(1)
            assert not run.saves.poll()
        assert not list(run.checkpoints.glob("step-*"))
    assert not wait_until_over(run)
    read = load(run.checkpoints).read(["weight/w", "bias/b0"])
    assert read["weight/w"].eq(1).all() and read["bias/b0"].eq(1).all()
    assert [event["event"] for event in run.events()] == ["save"]


def test_in_the_background_and_at_once_are_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for background in (True, False):
        run = run_of(tmp_path / str(background), background=background)
        for last in (False, False, True):
            run.train(1)
            run.saves.save(None, last=last)
            assert last or not background or not wait_until_over(run)
        files.append({p.relative_to(run.folder): p.read_bytes() for p in run.checkpoints.rglob("*") if p.is_file()})
        assert [event["step"] for event in run.events()] == [1, 2, 3]
    assert files[0] == files[1] and len(files[0]) == 7


def test_copies_use_the_same_room(tmp_path: Path) -> None:
    """Contiguous or not, of any dtype, a part or whole; bit for bit, NaN too."""
    base = torch.arange(24.0).reshape(4, 6)
    views = {"a": base.t(), "b": base[1:3].reshape(-1), "c": torch.tensor([1, 2]), "n": torch.tensor([float("nan")])}
    tensors: dict[str, Tensor | TensorPart] = {**views, "p": TensorPart(base.view(-1)[3:9], 3, (24,))}
    copy = snapshot.HostCopy()
    places = []
    for _ in range(2):
        copied = copy.copy(tensors)
        places.append(
            {
                name: (tensor.values if isinstance(tensor, TensorPart) else tensor).data_ptr()
                for name, tensor in copied.items()
            }
        )
        for name, view in views.items():
            tensor = copied[name]
            assert isinstance(tensor, Tensor) and tensor.dtype == view.dtype and tensor.data_ptr() != view.data_ptr()
            assert torch.equal(tensor.nan_to_num(7), view.nan_to_num(7))
        part = copied["p"]
        assert isinstance(part, TensorPart) and torch.equal(part.values, base.view(-1)[3:9]) and part.start == 3
        base += 1
    assert places[0] == places[1] and len(set(places[0].values())) == len(tensors)


def test_a_copy_is_written_in_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for the head and one per dtype, for any number of tensors: each call switches Python's lock twice. The
    bytes equal the copied tensors, which are at any addresses."""
    base = torch.arange(600.0)
    views = {f"weight/{n}": base[7 * n : 7 * n + n % 7] for n in range(80)} | {"bias/b": torch.arange(5)}
    calls: list[str] = []
    monkeypatch.setattr(durable_files, "os", Calls(lambda _, name: calls.append(name)))
    pieces = {}
    for kind, tensors in (("copy", snapshot.HostCopy().copy(views)), ("views", views)):
        calls.clear()
        publish.write(tmp_path / kind, 1, [tensors], {})
        pieces[kind] = calls.count("write") - 2  # the note of the shard, and the manifest
    assert pieces["copy"] == 1 + 2 + 1 and pieces["views"] > 60  # LATEST is the last
    written = [(tmp_path / kind / "step-00000001/shard.0.safetensors").read_bytes() for kind in pieces]
    assert written[0] == written[1]


# ---------------------------------------------------------------- work of the training thread


FORBIDDEN = {"open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir", "preadv", "listdir", "update", "sha256"}
FORBIDDEN |= {"openssl_sha256", "dumps", "encode_basestring_ascii"}


def calls_of_this_thread(action: Callable[[], object]) -> Counter[str]:
    """Record the names of C functions and functions of durable_files that this thread calls in the block."""
    counts: Counter[str] = Counter()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            counts[argument.__name__] += 1
        elif event == "call" and frame.f_code.co_filename == durable_files.__file__:
            counts[f"durable_files.{frame.f_code.co_name}"] += 1

    sys.setprofile(see)
    try:
        action()
    finally:
        sys.setprofile(None)
    return counts


def test_the_training_thread_neither_hashes_nor_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    run.train(1)
    with held_up(monkeypatch):
        begun = calls_of_this_thread(lambda: run.saves.save(None, last=False))
        polled = calls_of_this_thread(run.saves.poll)
    assert not FORBIDDEN & begun.keys() and not [name for name in begun if name.startswith("durable_files")], begun
    assert begun["copy_"] == 2, "one copy for each tensor"
    assert polled.total() <= 3, "a step that follows asks whether the save is over, and no more"
    wait_until_over(run)
    run.train(1)
    waited = calls_of_this_thread(lambda: run.saves.save(None, last=True))
    assert not waited["copy_"], "what is waited for is not copied"


def test_a_save_waits_for_the_previous_one_and_reports_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    for _ in range(3):
        run.train(1)
        with held_up(monkeypatch) as free:
            run.saves.save(None, last=False)
            run.train(1)
            threading.Timer(0.05, free.set).start()
            run.saves.save(None, last=False)
        wait_until_over(run)
    notices = [event["text"] for event in run.events() if event["event"] == "notice"]
    assert notices == [
        "the save of step 2 waited for that of step 1: writing one takes longer than the steps between two saves"
    ]
    saved = [event for event in run.events() if event["event"] == "save"]
    assert [event["step"] for event in saved] == [1, 2, 3, 4, 5, 6]
    assert all(event["written_s"] > 0.04 for event in saved[::2]), saved


# ---------------------------------------------------------------- what fails


def failing(run: Run, step: int) -> Calls:
    """The disk is full for the save of one step."""

    def before(_: int, name: str) -> None:
        if name == "write" and run.trainer.step == step:
            raise OSError(NO_SPACE, os.strerror(NO_SPACE))

    return Calls(before)


def test_a_save_that_fails_in_the_background_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)
    monkeypatch.setattr(durable_files, "os", failing(run, 2))
    for _ in range(3):
        run.train(1)
        run.saves.save(None, last=False)
        assert wait_until_over(run) is False
    assert [event["event"] for event in run.events()] == ["save", "save_failed", "save"]
    assert len(run.said) == 1 and "step 2 was not saved, the run goes on to its next save: " in run.said[0]
    assert "No space left on device" in run.said[0]
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == ["step-00000001", "step-00000003"]


def test_a_save_that_must_not_fail_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, failure="stop")
    monkeypatch.setattr(durable_files, "os", failing(run, 2))
    for expected in (False, True):
        run.train(1)
        run.saves.save(None, last=False)
        assert wait_until_over(run) is expected
    run.train(1)
    assert run.saves.poll() is True
    with pytest.raises(CheckpointError, match=r"step 2 was not saved: .*No space left on device"):
        run.saves.save(None, last=True)
    assert load(run.checkpoints).step == 1


# ---------------------------------------------------------------- real processes


@pytest.mark.parametrize(("victim", "number"), [*((0, n) for n in range(0, 27, 3)), *((1, n) for n in range(7))])
def test_sigkill_while_a_rank_trains_on(tmp_path: Path, victim: int, number: int) -> None:
    """The kill is at a call of the saving thread, between two steps of the training thread; then the run is resumed."""
    folder = tmp_path / "run"

    def killing(now: int, _name: str) -> None:
        if now >= number:
            os.kill(os.getpid(), signal.SIGKILL)

    def target(rank: int, world: int, board: Board, fault: bool) -> None:
        run = run_of(folder, rank, world, board, keep=1)
        run.train(0 if fault else 2)
        board.start_step(run.trainer.step + 1)
        run.train(1)
        run.saves.save(None, last=True)
        if fault:
            if rank == victim:
                durable_files.os = Calls(killing)  # type: ignore[assignment]
            run.train(1)
            run.saves.save(None, last=False)
            while run.saves._begun is not None:  # training, until the supervisor ends it
                run.trainer.weights += 1
                run.saves.poll()
            raise AssertionError(f"a save has no call {number}")

    folder.mkdir()
    outcome = launch(lambda *a: target(*a, fault=True), 2, folder=tmp_path)
    assert (outcome.kind, outcome.rank) == ("failed", victim), outcome
    checkpoint = load(folder / "checkpoints")
    assert checkpoint.refused == () and checkpoint.step in (1, 2)
    assert checkpoint.read(["weight/w"])["weight/w"].eq(checkpoint.step).all()
    assert launch(lambda *a: target(*a, fault=False), 2, folder=tmp_path).ok
    assert load(folder / "checkpoints").step == 3
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["LATEST", "step-00000003"]


def test_results_of_copies_are_reported_after_a_step(tmp_path: Path) -> None:
    """A place is failing until a copy reaches it, even if older ones stay there."""
    run, ended = run_of(tmp_path), list[CopyResult]()
    run.saves._copiers = [cast(Copier, SimpleNamespace(finished_copies=lambda: ended))]
    for failing, message, copied in (
        ({"far": 1}, "step 1 was not copied to far, the next checkpoint will be: no route", {"reason": "no route"}),
        ({"far": 1}, "step 2 was not copied to far, the next checkpoint will be: full", {"reason": "full"}),
        ({"far": 1}, None, {"was_skipped": True}),
        ({}, "step-4 is copied to far, but older ones were not removed: denied", {"note": "denied"}),
        ({}, None, {}),
    ):
        run.train(1)
        run.said.clear()
        ended[:] = [CopyResult(run.trainer.step, f"step-{run.trainer.step}", "far", **cast(Any, copied))]
        assert not run.saves.poll()
        assert run.said == [message] * bool(message) and run.saves.failing == failing
    events = [(event["event"], event.get("step")) for event in run.events()]
    assert events == [("copy_failed", 1), ("copy_failed", 2), ("notice", None), ("copy", 4), ("copy", 5)]


@pytest.mark.parametrize("failure", ["continue", "stop"])
def test_an_unwritable_shard_ends_all_ranks_after_the_same_step(tmp_path: Path, failure: str) -> None:
    """Rank 1 cannot write its shard of step 2. With `failure = stop` no rank trains a step that others do not."""
    folder = tmp_path / "run"

    def full(_: int, name: str) -> None:
        if name == "fsync":
            raise OSError(NO_SPACE, os.strerror(NO_SPACE))

    def target(rank: int, world: int, board: Board) -> None:
        run = run_of(folder, rank, world, board, failure=failure)
        for step in range(1, 1000):
            board.start_step(step)
            run.train(1)
            torch.distributed.barrier()
            if run.saves.poll() and rank == 0:
                board.request_stop(signal.SIGTERM)
            stop = board.should_stop(step) or (failure == "continue" and step == 30)
            (folder / f"steps.{rank}").write_text(str(step))
            if rank == 1:
                durable_files.os = Calls(full) if step == 2 else os  # type: ignore[assignment]
            if step <= 2 or stop:
                run.saves.save(None, last=stop)
                run.saves.settle()
            if stop:
                return

    folder.mkdir()
    outcome = launch(target, 2, folder=tmp_path)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text("utf-8").splitlines()]
    assert [event["step"] for event in events if event["event"] == "save_failed"] == [2]
    assert "shard.1.safetensors: No space left on device" in events[1]["reason"]
    steps = {(folder / f"steps.{rank}").read_text() for rank in range(2)}
    assert len(steps) == 1, "both ranks end behind the same step"
    assert outcome.ok == (failure == "continue") and outcome.kind == ("finished" if outcome.ok else "failed")
    assert load(folder / "checkpoints").step == (30 if outcome.ok else 1)
    assert failure == "continue" or 2 < int(steps.pop()) < 30
