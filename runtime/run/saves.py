"""Saving checkpoints during training: when one is due, what it records, and what happens if it fails.

In the background: a rank copies its tensors to host memory and trains on. A thread writes the copy, hashes it, syncs
the disk and meets the threads of the other ranks. There is one save at a time: the next waits for the one before.
Training waits for the last save, and for the save before a stop. The result of a save is reported after the next step.

A failed save does not touch older checkpoints. It is reported, and the run continues to the next save, unless the spec
has `failure = stop`. If the last save fails, the run has failed.

A published checkpoint is copied to the other places in the spec (runtime/checkpoint/copies.py), in the background too.
The result is reported after a step. At its end, a run waits for copies.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.checkpoint import publish
from runtime.checkpoint.copies import Copier
from runtime.checkpoint.places import CopyPlace, Inventory, inventory
from runtime.checkpoint.retention import LOSS, RetentionPolicy
from runtime.checkpoint.shard_manifest import CHECKPOINTS, CheckpointError
from runtime.launch.rank_process import NO_TIMEOUT
from runtime.observe.events import Events
from runtime.state import snapshot
from runtime.step.trainer import Trainer
from runtime.system.regular_files import read_bytes, write

LAST_COPY_S = 1800.0  # limit for copying the last checkpoint of a run to its places
STOP_COPY_S = 300.0  # limit for copying the checkpoint before a stop
SWITCH_S = 1e-4  # longest time that a thread keeps the GIL while training waits for it; Python's default is 5 ms
MUST_WAIT = "the save of step {} waited for that of step {}: writing one takes longer than the steps between two saves"


@dataclass(frozen=True)
class _Save:
    """A save that was started. `waited_s`: time for which training waited."""

    step: int
    waited_s: float
    written: Future[dict[str, Any]]  # facts for the event log


class Saves:
    """The checkpoints that one rank saves in the folder `run`, as the spec asks. All ranks of a world construct it.

    `about`: facts about the run for each checkpoint, JSON. `say`: shows a line to the user. `places`: where checkpoints
    are copied to.
    """

    def __init__(
        self,
        trainer: Trainer,
        world: int,
        run: Path,
        about: Mapping[str, Any],
        events: Events,
        say: Callable[[str], None],
        places: Sequence[CopyPlace] = (),
    ) -> None:
        self._trainer, self._run, self._about, self._events, self._say = trainer, run, about, events, say
        self._spec = spec = trainer.plan.train.checkpoint
        keep = RetentionPolicy(spec.keep, spec.best, spec.keep_every) if spec else RetentionPolicy(1, 0, None)
        self._meeting, checkpoints = _SaveMeeting(world), run / CHECKPOINTS
        self._copiers = [Copier(place, checkpoints, trainer.rank, keep, _SaveMeeting(world)) for place in places]
        elsewhere = inventory(places) if trainer.rank == 0 else Inventory()
        self._publisher = publish.Publisher(
            checkpoints, trainer.rank, world, self._meeting.barrier, keep, self._held_names, elsewhere
        )
        self.failing: dict[str, int] = {}  # places whose last copy failed → the step of the first failure in a row
        sys.setswitchinterval(SWITCH_S)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._copy = snapshot.HostCopy()
        self._begun: _Save | None = None
        self._failed: CheckpointError | None = None  # failure of a save after which the run must end
        self._has_waited = False

    def is_due(self, step: int) -> bool:
        """Whether the spec asks for a checkpoint after a step that is not the last."""
        return self._spec is not None and step % self._spec.every == 0

    def save(self, validation_loss: float | None, *, last: bool) -> None:
        """Save the state after a step; every rank calls it. `last`: this process will save no other.

        Raises CheckpointError on all ranks if this save fails, is not in the background, and is the last or the spec
        has `failure = stop`. Raises it also if the save before failed with `failure = stop`.
        """
        trainer = self._trainer
        trainer.board.set_action("checkpoint")
        start_s = time.perf_counter()
        self._wait_for_previous()
        trainer.settle()
        tensors = snapshot.take(trainer.state, trainer.plan, trainer.rank)
        in_background = not last and self._spec is not None and self._spec.background
        if in_background:
            tensors = self._copy.copy(tensors)
        written = self._thread.submit(self._write, trainer.step, tensors, self._meta(validation_loss))
        self._begun = _Save(trainer.step, time.perf_counter() - start_s, written)
        if not in_background:
            self._end(last=last)

    def poll(self) -> bool:
        """Report the result of the pending save, if it has ended; every rank calls this after every step.

        Return whether the run must end because of it. Ranks may learn that after different steps, and have to agree on
        the last one.
        """
        if self._begun is not None and self._begun.written.done():
            self._end()
        for copier in self._copiers:
            self._report_copies(copier)
        return self._failed is not None

    def settle(self) -> None:
        """Wait for the pending save when a run is about to fail; every rank calls it."""
        with suppress(CheckpointError):
            self._end()

    def finish(self, *, stopped: bool) -> None:
        """Wait for pending copies at the end of a run; every rank calls it. `stopped`: by a signal, so that little time
        is left."""
        most_s = STOP_COPY_S if stopped else LAST_COPY_S
        for copier in self._copiers:
            if not copier.close(most_s, self._trainer.board.set_action) and self._trainer.rank == 0:
                self._report_failed_copy(
                    copier.place.text, self._trainer.step, f"it was not there after {most_s:.0f} s"
                )
            self._report_copies(copier)
        if self._copiers and self._trainer.rank == 0:
            with suppress(OSError, CheckpointError):
                self._publisher.retire()

    def _held_names(self) -> Set[str]:
        return frozenset().union(*(copier.held_names() for copier in self._copiers))

    def _report_copies(self, copier: Copier) -> None:
        """Report copies that have ended."""
        for copied in copier.finished_copies():
            place = copied.place
            if copied.was_skipped:
                text = f"step {copied.step} was not copied to {place}: a newer one was saved before its turn"
                self._events.write("notice", rank=0, text=text)
            elif copied.reason:
                self._report_failed_copy(place, copied.step, copied.reason)
            else:
                self.failing.pop(place, None)
                facts = {"checkpoint": copied.name, "place": place, "bytes": copied.num_bytes}
                self._events.write("copy", step=copied.step, **facts, seconds=copied.seconds)
                if copied.note:
                    self._say(f"{copied.name} is copied to {place}, but older ones were not removed: {copied.note}")

    def _report_failed_copy(self, place: str, step: int, reason: str) -> None:
        self.failing.setdefault(place, step)
        if self._trainer.rank == 0:
            self._events.write("copy_failed", step=step, place=place, reason=reason)
        self._say(f"step {step} was not copied to {place}, the next checkpoint will be: {reason}")

    def _wait_for_previous(self) -> None:
        if self._begun is not None and not self._begun.written.done() and not self._has_waited:
            self._has_waited = True
            if self._trainer.rank == 0:
                self._events.write("notice", rank=0, text=MUST_WAIT.format(self._trainer.step, self._begun.step))
        self._end()
        if self._failed:
            raise self._failed

    def _end(self, *, last: bool = False) -> None:
        """Wait for the pending save, and report its result."""
        if self._begun is None:
            return
        save, self._begun, start_s = self._begun, None, time.perf_counter()
        try:
            facts = save.written.result()
        except CheckpointError as error:
            self._report_failed_save(save.step, error, last=last)
            return
        if note := facts.pop("note", ""):
            self._say(note)
        if self._trainer.rank == 0:
            waited_s = round(save.waited_s + time.perf_counter() - start_s, 3)
            self._events.write("save", step=save.step, **facts, seconds=waited_s)

    def _report_failed_save(self, step: int, error: CheckpointError, *, last: bool) -> None:
        if self._trainer.rank == 0:
            self._events.write("save_failed", step=step, reason=str(error))
        if last:
            raise error
        if self._spec is not None and self._spec.failure == "stop":
            if not self._spec.background:
                raise error
            self._failed = CheckpointError(f"step {step} was not saved: {error}", of_peer=error.of_peer)
            return
        text = f"step {step} was not saved, the run goes on to its next save: {error}"
        print(text, flush=True)
        if not error.of_peer:
            self._say(text)

    def _meta(self, validation_loss: float | None) -> dict[str, Any]:
        """Return the metadata of the checkpoint."""
        trainer = self._trainer
        loads = {name: load.tolist() for name, load in trainer.loads.items()}
        meta = {**self._about, "threads": torch.get_num_threads(), "loads": loads}
        meta |= {"position": trainer.position.to_json()}
        meta |= {"health": remembered} if (remembered := trainer.watch.recent.to_json()) else {}
        return meta | (
            {LOSS: validation_loss} if validation_loss is not None and math.isfinite(validation_loss) else {}
        )

    def _write(self, step: int, tensors: publish.ShardData, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Publish a checkpoint, in the thread for saves. Return facts for the event log and, on rank 0, perhaps a
        `note`."""
        start_s = time.perf_counter()
        saved = self._publisher.save(step, tensors, meta)
        for copier in self._copiers:
            copier.offer(step, saved)
        if self._trainer.rank != 0:
            return {}
        facts = {**_newest(self._publisher.folder), "written_s": round(time.perf_counter() - start_s, 3)}
        if not meta["loads"]:
            return facts
        try:
            write(self._run / "load.json", json.dumps({"load": list(meta["loads"].values())}) + "\n")
        except OSError as error:
            facts["note"] = f"{self._run / 'load.json'} was not written: {error.strerror}"
        return facts


class _SaveMeeting:
    """Barrier and reductions of the threads that save or copy, one per rank, in a process group separate from
    training."""

    def __init__(self, world: int) -> None:
        self._group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT) if world > 1 else None

    def barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)

    def all(self, yes: bool) -> bool:
        """Whether `yes` is true on every rank."""
        verdict = torch.tensor(int(yes))
        if self._group is not None:
            dist.all_reduce(verdict, dist.ReduceOp.MIN, self._group)
        return bool(verdict.item())

    def broadcast(self, numbers: list[int]) -> list[int]:
        """Return the numbers of rank 0."""
        values = torch.tensor(numbers)
        if self._group is not None:
            dist.broadcast(values, 0, self._group)
        return list(map(int, values))


def _newest(folder: Path) -> dict[str, Any]:
    """Return the name and bytes of the newest checkpoint, for the event log."""
    with suppress(OSError, UnicodeDecodeError):
        name = read_bytes(folder / publish.LATEST).decode().strip()
        return {"checkpoint": name, "bytes": sum(path.stat().st_size for path in (folder / name).iterdir())}
    return {}
