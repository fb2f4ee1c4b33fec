"""Copies of checkpoints in other places: complete, or without a manifest, however they end; and fetching them back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from runtime.checkpoint import shard_manifest
from runtime.checkpoint.copies import Copier, CopyResult
from runtime.checkpoint.places import CopyPlace, FolderPlace, StorePlace, inventory
from runtime.checkpoint.publish import Publisher, RetentionPolicy, TensorPart, load
from runtime.checkpoint.restore import restore
from tests.runtime.copied import Run, taken_back, tensors
from tests.runtime.faulty_files import BROKEN, NO_SPACE, Calls, Killed, fail_from, kill_at


class Threads:
    """A process group of ranks that are threads."""

    def __init__(self, world: int) -> None:
        self.barrier, self.said, self.told = threading.Barrier(world), list[bool](), list[list[int]]()

    def of(self, rank: int) -> Threads._OfRank:
        return Threads._OfRank(self, rank)

    class _OfRank:
        def __init__(self, all_: Threads, rank: int) -> None:
            self.shared, self.rank = all_, rank

        def all(self, yes: bool) -> bool:
            self.shared.said.append(yes)
            self.shared.barrier.wait()
            verdict = all(self.shared.said)
            self.shared.barrier.wait()
            if self.rank == 0:
                self.shared.said.clear()
            self.shared.barrier.wait()
            return verdict

        def broadcast(self, numbers: list[int]) -> list[int]:
            if self.rank == 0:
                self.shared.told.append(numbers)
            self.shared.barrier.wait()
            first_numbers = self.shared.told[-1]
            self.shared.barrier.wait()
            return first_numbers


# ---------------------------------------------------------------- copies


def test_every_checkpoint_is_copied_byte_for_byte_and_the_newest_stay(tmp_path: Path, place: CopyPlace) -> None:
    run = Run(tmp_path / "run", place, keep=2)
    for step in (1, 2, 3):
        (copied,) = run.save(step)
        assert (copied.step, copied.reason, copied.note) == (step, "", "")
        assert copied.num_bytes > 256
    assert place.names() == ["step-00000002", "step-00000003"]
    for name in place.names():
        for file in ("manifest.json", "shard.0.safetensors"):
            local = (tmp_path / "run" / "checkpoints" / name / file).read_bytes()
            assert b"".join(map(bytes, place.read(name, file))) == local
    assert taken_back(tmp_path / "new", place) == 3


def test_checkpoints_saved_during_a_copy_are_superseded_by_the_newest(tmp_path: Path, place: CopyPlace) -> None:
    """The current copy ends, the newest of the others is next, and the run keeps checkpoints until they are copied."""
    run = Run(tmp_path / "run", place)
    begin = run.copier._begin

    def meanwhile(new: Any) -> None:
        for step in (2, 3, 4) if new.manifest.step == 1 else ():
            run.publish(step)
        begin(new)

    run.copier._begin = meanwhile  # type: ignore[method-assign]
    first = run.save(1)
    assert {(copied.step, copied.was_skipped) for copied in first} == {(1, False), (2, True), (3, True)}
    assert run.copier.held_names() == {"", "step-00000004"}
    assert [(copied.step, copied.reason) for copied in run.copy()] == [(4, "")]
    assert place.names() == ["step-00000004"]
    run.publisher.retire()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["LATEST", "step-00000004"]


def test_ranks_copy_their_shards_and_a_failure_leaves_no_manifest(tmp_path: Path) -> None:
    checkpoints, ranks = tmp_path / "run" / "checkpoints", 3
    barrier, meeting = threading.Barrier(ranks), Threads(ranks)
    copies: dict[int, list[CopyResult]] = {}

    class Full(FolderPlace):
        steps = frozenset({"step-00000001"})

        def write(self, name: str, file: str, chunks: Any) -> None:
            if name in self.steps and file.startswith("shard.2"):
                raise OSError(NO_SPACE, os.strerror(NO_SPACE))
            super().write(name, file, chunks)

    def rank(number: int) -> None:
        place = Full("slow", tmp_path / "slow")
        copier = Copier(place, checkpoints, number, RetentionPolicy(1), meeting.of(number))
        publisher = Publisher(
            checkpoints, number, ranks, lambda: void(barrier.wait()), RetentionPolicy(1), copier.held_names
        )
        for step in (1, 2):
            part = TensorPart(torch.full((8,), float(step)), 8 * number, (8 * ranks,))
            copier.offer(step, publisher.save(step, {"weight/w": part}, {}))
            while copier._shards or (number == 0 and copier.held_names() != {""}):  # in its own thread
                copier._thread.join(0.001)  # type: ignore[union-attr]
        assert copier.close(30, lambda _: None)
        copies[number] = [*copier.finished_copies()]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reasons = {number: [copied.reason for copied in copied_by_rank] for number, copied_by_rank in copies.items()}
    assert reasons == {
        0: ["another rank could not copy its shard, see its log", ""],
        1: [],
        2: ["slow: No space left on device"],
    }
    place = FolderPlace("slow", tmp_path / "slow")
    assert place.names() == ["step-00000002"], "what did not end is removed"
    restore(tmp_path / "new", [place], print)
    assert load(tmp_path / "new" / "checkpoints").read(["weight/w"])["weight/w"].eq(2).all()


def void(_: object) -> None:
    """Drop a value."""


def test_manifests_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save parses no manifest; it compares bytes written with those read. Old ones are parsed at the first save."""
    from runtime.checkpoint import places

    parsed: list[int] = []
    really = shard_manifest.parse

    def parse(data: bytes) -> Any:
        parsed.append(len(data))
        return really(data)

    Run(tmp_path / "run", FolderPlace("slow", tmp_path / "slow"), keep=3).save(1)
    monkeypatch.setattr(shard_manifest, "parse", parse)
    monkeypatch.setattr(places, "parse", parse)
    run = Run(tmp_path / "run", FolderPlace("slow", tmp_path / "slow"), keep=3)
    counts = []
    for step in (2, 3, 4, 5):
        run.save(step)
        counts.append(len(parsed))
    assert counts == [2, 2, 2, 2], "that of step 1, in the run and in the place"


# ---------------------------------------------------------------- what ends a copy


def copied_once(tmp_path: Path, number: int) -> Run:
    """A run whose first checkpoint has been copied, and whose second is published."""
    folder = tmp_path / str(number)
    folder.mkdir()
    run = Run(folder / "run", FolderPlace("slow", folder / "slow"))
    run.save(1)
    run.publish(2)
    return run


def num_calls(tmp_path: Path, faulty: Callable[[Calls], Calls]) -> int:
    run, calls = copied_once(tmp_path, -1), faulty(Calls())
    run.copy()
    assert calls.count > 15
    return calls.count


@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_at_any_call_of_a_copy_leaves_a_checkpoint_there(
    tmp_path: Path, faulty: Callable[[Calls], Calls], torn: bool
) -> None:
    steps = []
    for number in range(num_calls(tmp_path, faulty)):
        run = copied_once(tmp_path, number)
        faulty(Calls(kill_at(number), torn_write=number if torn else -1))
        with pytest.raises(Killed):
            run.copy()
        faulty(Calls())
        new = tmp_path / "new"
        steps.append(taken_back(new, run.place))
        again = Run(run.folder, run.place, elsewhere=inventory([run.place]))
        (copied,) = again.save(3)
        assert (copied.reason, copied.note) == ("", "")
        assert run.place.names() == ["step-00000003"] and taken_back(new, run.place) == 3
    assert steps == sorted(steps) and set(steps) == {1, 2}


@pytest.mark.parametrize("error", [NO_SPACE, BROKEN])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_place_that_fails_at_any_call_is_reported_and_retried(
    tmp_path: Path, faulty: Callable[[Calls], Calls], error: int, lasting: bool
) -> None:
    failures = 0
    for number in range(num_calls(tmp_path, faulty)):
        run = copied_once(tmp_path, number)
        faulty(Calls(fail_from(number, 10**9 if lasting else number, error)))
        (copied,) = run.copy()
        faulty(Calls())
        if copied.reason:
            failures += 1
            assert copied.reason == f"slow: {os.strerror(error)}"
            assert taken_back(tmp_path / "new", run.place) in (1, 2)
        else:
            assert taken_back(tmp_path / "new", run.place) == 2
        assert load(run.folder / "checkpoints").step == 2, "the run has its own"
        assert [copied.reason for copied in run.save(3)] == [""]
        assert run.place.names() == ["step-00000003"]
    assert failures > 5


def test_a_store_that_refuses_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may raise any exception: its text is reported, and the next checkpoint is copied."""
    fsspec.filesystem("memory").store.clear()
    place = StorePlace("memory://bucket/mine")
    run = Run(tmp_path / "run", place)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("EndpointConnectionError: could not connect")

    with monkeypatch.context() as patched:
        patched.setattr(place._files, "open", refuse)
        (copied,) = run.save(1)
    assert copied.reason == "memory://bucket/mine: RuntimeError: EndpointConnectionError: could not connect"
    assert [copied.reason for copied in run.save(2)] == [""]
    assert place.names() == ["step-00000002"]


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_changed_copy_is_found_before_the_manifest_is_written(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    class Lying(FolderPlace):
        def write(self, name: str, file: str, chunks: Any) -> None:
            super().write(name, file, [change(b"".join(map(bytes, chunks)))])

    run = Run(tmp_path / "run", Lying("slow", tmp_path / "slow"))
    (copied,) = run.save(1)
    assert copied.reason == "slow: step-00000001/shard.0.safetensors is not what was written"
    assert inventory([run.place]).entries == ()


def test_another_checkpoint_of_the_same_name_is_not_written_over(tmp_path: Path) -> None:
    place = FolderPlace("slow", tmp_path / "slow")
    Run(tmp_path / "one", place).save(1)
    namesake = Run(tmp_path / "other", place)
    namesake.publisher.save(7, tensors(7), {})
    (copied,) = namesake.save(1)
    assert copied.reason == "slow has another checkpoint step-00000001: move it away"
    assert taken_back(tmp_path / "new", place) == 1
    new = Run(tmp_path / "third", place, elsewhere=inventory([place]))
    assert [(copied.name, copied.reason) for copied in new.save(1)] == [("step-00000001.1", "")]
    assert load(tmp_path / "third" / "checkpoints").manifest.serial == 2, "newer than all that are there"
