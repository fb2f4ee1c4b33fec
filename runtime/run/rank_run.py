"""The steps of one rank in a run: train a step, call its observers, save, and close when the run is over."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any

import torch.distributed as dist

from runtime.checkpoint.retention import LOSS
from runtime.checkpoint.shard_manifest import CheckpointError
from runtime.launch.heartbeat import Board
from runtime.observe.events import Events
from runtime.observe.health import record
from runtime.observe.health.judge import BadStepError
from runtime.observe.health.replicas import ReplicaError
from runtime.observe.health.stragglers import StragglerError
from runtime.run.observers import EndedStep, Observer, StepRow
from runtime.run.saves import Saves
from runtime.run.witness import as_hex
from runtime.step.trainer import Trainer


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run of a rank. total: the last step. text: the digest of the corpus. saves: whether the run saves
    checkpoints. replays: whether it is a replay, which ends at a bad step."""

    run: Path
    text: str
    total: int
    saves: bool
    replays: bool


@dataclass
class RankRun:
    """A rank that is ready to train. The first observer is the innermost around a step, and the first called after
    it."""

    facts: RunFacts
    trainer: Trainer
    board: Board
    saves: Saves
    observers: Sequence[Observer]
    events: Events
    say: Callable[[str], None]
    _is_stopped: bool = False  # by a signal, or because a required save failed
    _is_over: bool = False

    def train_to_end(self) -> None:
        """Train until the last step, or until the run is stopped."""
        while self.trainer.step < self.facts.total and not self._is_over:
            row = self._train()
            if row is not None:
                self._finish_step(row)
        self._close()

    def _train(self) -> StepRow | None:
        """Train a step and return its metrics. Return None if the step was skipped: it changed nothing."""
        self.board.start_step(self.trainer.step + 1)
        step = self.trainer.train_step
        for observer in self.observers:
            step = partial(observer.train, step)
        with self._end_together():
            try:
                return step()
            except BadStepError as bad:
                self._leave_out(bad)
                return None

    def _finish_step(self, row: StepRow) -> None:
        """Finish a step: call observers, save a checkpoint, stop if requested."""
        trainer, saves = self.trainer, self.facts.saves
        is_last, can_end = trainer.step == self.facts.total, trainer.is_between_rollouts
        if self.saves.poll() and trainer.rank == 0:
            self.board.request_stop(SIGTERM)  # ranks agree on the last step as for a signal
        self._is_stopped = self.board.should_stop(trainer.step) and can_end
        is_saved = saves and can_end and (is_last or any(map(self.saves.is_due, trainer.steps_of_rollout)))
        step = EndedStep(row, trainer.step, is_last, is_saved)
        with self._end_together():
            for observer in self.observers:
                observer.after_step(step)
        if step.leaving and not self._is_stopped:
            self._leave(step.leaving, row)
        elif is_saved or (self._is_stopped and saves):
            with trainer.time.count_block("checkpoint"):
                self.saves.save(row.get(LOSS), last=is_last or self._is_stopped)
        if self._is_stopped:
            self._is_over = True
            if trainer.rank == 0 and (request := self.board.stop_request()):
                receiver = "supervisor" if request.rank < 0 else f"rank {request.rank}"
                self.events.write("stop", step=trainer.step, signal=Signals(request.signal).name, received_by=receiver)

    def _leave(self, error: StragglerError, row: StepRow) -> None:
        """Save the state and end all ranks with an error. If it cannot be saved, the run goes on as it is."""
        try:
            self.saves.save(row.get(LOSS), last=True)
        except CheckpointError:
            if not error.of_peer:
                self.say("its device stays: the state was not saved")
            return
        with self._end_together():
            raise error

    def _close(self) -> None:
        self.trainer.close()
        self.saves.finish(stopped=self._is_stopped)
        for observer in self.observers:
            observer.close()
        self.events.close()

    def _leave_out(self, bad: BadStepError) -> None:
        """Skip the samples of a bad step, or raise `bad`, to end the run or to roll it back. A replay ends here, as it
        was run for this step."""
        trainer, action = self.trainer, bad.verdict.action
        if trainer.rank == 0:
            self._record(bad)
        if action == "skip":
            trainer.leave_out()
            if trainer.rank == 0:
                first, end = bad.samples
                self.say(f"step {bad.step}: {bad.verdict.reason}; samples {first:,} to {end - 1:,} are left out")
        elif self.facts.replays:
            self._is_over = True
        else:
            raise bad.with_earlier_failure(record.earlier_failed_samples(self.facts.run, self._record_identity, bad))

    def _record(self, bad: BadStepError) -> None:
        """Write a bad step to the event log. If it ends the run or rolls it back, add it to the record of such
        steps."""
        world = self.trainer.plan.mesh.world
        facts: StepRow = {"samples": [bad.samples[0], bad.samples[1] - 1], "loss": _number(bad.loss)}
        facts |= {"grad_norm": _number(bad.norm), "to": bad.target_step}
        facts |= {"prints": [as_hex(digest) for digest in bad.prints]}
        facts |= {"replay": f"dsc replay {shlex.quote(str(self.facts.run))} {bad.step}{' --swap all' * (world > 1)}"}
        action = bad.verdict.action
        self.events.write("bad_step", step=bad.step, action=action, reason=bad.verdict.reason, **facts)
        if action != "skip" and not self.facts.replays:
            with suppress(OSError):
                record.record(self.facts.run, self._record_identity, bad)

    @property
    def _record_identity(self) -> dict[str, Any]:
        return record.identity(self.trainer.position, self.facts.text)

    @contextmanager
    def _end_together(self) -> Iterator[None]:
        """If all ranks raise the same error, each prints it and finishes its pending save before any of them exits."""
        try:
            yield
        except (BadStepError, ReplicaError, StragglerError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)  # the first rank that ends may end the others
            self.saves.settle()
            if self.trainer.plan.mesh.world > 1:
                dist.barrier()
            raise


def _number(value: float) -> float | str:
    """Return a number, or its name if JSON cannot express it."""
    return value if math.isfinite(value) else str(value)
