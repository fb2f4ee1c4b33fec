"""Observers of a rank's steps: measurements, checks, validation and output beside the training.

A run attaches the observers that it needs. The loop calls the same three hooks of each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from runtime.contract.recipe import Validation
from runtime.launch.heartbeat import Board
from runtime.observe.events import Events
from runtime.observe.health import replicas
from runtime.observe.health.device_watch import DeviceWatch
from runtime.observe.health.stragglers import LINK_PARTS, Straggler, StragglerError, Stragglers, peers_of
from runtime.observe.metrics import MetricsWriter
from runtime.observe.progress import Progress
from runtime.observe.slots import host
from runtime.run.saves import Saves
from runtime.step import ledger
from runtime.step.trace import Trace
from runtime.step.trainer import Trainer

StepRow: TypeAlias = dict[str, Any]


@dataclass
class EndedStep:
    """A trained step. `row`: its metrics, to which observers may add. `is_last`: the run ends with this step.
    `is_saved`: a regular checkpoint follows; the checkpoint of a stopped run does not count. `leaving`: set by an
    observer on all ranks: an error with which all ranks end, once the state after this step is saved."""

    row: StepRow
    number: int
    is_last: bool
    is_saved: bool
    leaving: StragglerError | None = None


class Observer:
    """Follows the steps of a rank. A hook that is not overridden adds nothing."""

    def train(self, step: Callable[[], StepRow]) -> StepRow:
        """Wrap the training of a step: call `step` once and return its result."""
        return step()

    def after_step(self, step: EndedStep) -> None:
        """Called after a step, before it is saved."""

    def close(self) -> None:
        """Called when the run ends without an error."""


@dataclass
class FirstLedger(Observer):
    """Writes the memory ledger of the first step that a run trains with a build on CPUs, once per build.
    `build_digest`: of the run's copy of the build."""

    trainer: Trainer
    run: Path
    build_digest: str

    def __post_init__(self) -> None:
        self._is_written = ledger.has_ledger(self.run, self.trainer.rank, self.build_digest)

    def train(self, step: Callable[[], StepRow]) -> StepRow:
        if self._is_written:
            return step()
        self._is_written, trainer = True, self.trainer
        trainer.roll_out()  # not part of the planned step, so not measured
        with trainer.ledger() as memory_ledger:
            row = step()
        with suppress(OSError):  # a full disk must not end the run
            memory_ledger.write(self.run, trainer.rank, trainer.step, trainer.batch.program, self.build_digest)
        return row


@dataclass
class StepTraces(Observer):
    """Writes the trace of the rank. `replayed`: the step of a replay, which is always traced."""

    trainer: Trainer
    trace: Trace
    replayed: int | None = None

    def train(self, step: Callable[[], StepRow]) -> StepRow:
        row, batch = step(), self.trainer.batch
        self.trace.write(self.trainer.step, batch.program, batch.spans, wanted=self.trainer.step == self.replayed)
        return row

    def close(self) -> None:
        self.trace.close()


@dataclass
class RerunFaults(Observer):
    """Reports steps whose recomputation gave different bits, even if the step is a bad one."""

    trainer: Trainer
    events: Events
    say: Callable[[str], None]

    def train(self, step: Callable[[], StepRow]) -> StepRow:
        try:
            return step()
        finally:
            faults = self.trainer.watch.faults
            for fault in faults if self.trainer.rank == 0 else ():
                self.events.write("fault", step=fault.step, reason=fault.reason, ranks=[*fault.ranks], tensors=[])
                self.say(f"step {fault.step}: {fault.reason}; the second result is used")
            faults.clear()


@dataclass
class DeviceLooks(Observer):
    """Looks at the device of the rank after a fault, beside the looks that `watch` takes by itself."""

    watch: DeviceWatch

    def train(self, step: Callable[[], StepRow]) -> StepRow:
        try:
            return step()
        except Exception:
            self.watch.look()
            raise

    def close(self) -> None:
        self.watch.close()


@dataclass
class ReplicaCheck(Observer):
    """Compares the bits of replicated tensors between ranks, every few steps and before a checkpoint. Raises
    ReplicaError on all ranks."""

    trainer: Trainer
    every: int
    events: Events

    def after_step(self, step: EndedStep) -> None:
        if not step.is_saved and step.number % self.every:
            return
        trainer = self.trainer
        trainer.settle()
        trainer.board.set_action("compare replicas")
        differences = replicas.compare(trainer.state, trainer.plan, trainer.rank, trainer.links.sums)
        if differences:
            error = replicas.ReplicaError(trainer.step, differences)
            if trainer.rank == 0:
                facts = {"ranks": error.ranks, "tensors": error.tensors}
                self.events.write("fault", step=trainer.step, reason="; ".join(map(str, differences)), **facts)
            raise error


@dataclass
class StragglerWatch(Observer):
    """Reports slow ranks. `excludes`: whether the run goes on without the device of one. `kept_because`: why it cannot,
    "" if it can.

    Every rank comes to the same result without a message, and a straggler reports itself, as it knows its machine.
    """

    trainer: Trainer
    events: Events
    say: Callable[[str], None]
    excludes: bool
    kept_because: str

    def __post_init__(self) -> None:
        self._stragglers = Stragglers(peers_of(self.trainer.plan.mesh))
        self._leaving: Straggler | None = None

    def after_step(self, step: EndedStep) -> None:
        for straggler, began in self._stragglers.after(step.number, self.trainer.time.works):
            kept_because = self._reason_to_keep(straggler)
            if began and self.excludes and not kept_because:
                self._leaving = straggler
            elif not began and self._leaving == straggler:
                self._leaving = None
            if straggler.rank == self.trainer.rank:
                self._report(step.number, straggler, kept_because, began=began)
        if active := self._stragglers.active:
            slowest = max(active.values(), key=lambda straggler: straggler.factor)
            step.row |= {"straggler": slowest.rank, "straggler_factor": round(slowest.factor, 3)}
        if self._leaving and self.trainer.is_between_rollouts and not step.is_last:
            of_peer = self._leaving.rank != self.trainer.rank
            step.leaving, self._leaving = StragglerError(step.number, self._leaving, host(), of_peer=of_peer), None

    def _reason_to_keep(self, straggler: Straggler) -> str:
        """Return why the device of a straggler stays in the run, "" if it does not."""
        if straggler.part in LINK_PARTS:
            return "a link is slow, which may be that of another rank"
        num_others = self.trainer.plan.mesh.world - 1
        if self.kept_because or straggler.factor * num_others > num_others + 1:
            return self.kept_because
        return f"without it, a step would take {(num_others + 1) / num_others:.2f} times as long"

    def _report(self, step: int, straggler: Straggler, kept_because: str, *, began: bool) -> None:
        facts: StepRow = {"step": step, "rank": straggler.rank, "host": host()}
        if not began:
            self.events.write("straggler_over", **facts)
            self.say(f"step {step:,}: rank {straggler.rank} on {host()} is as fast as its peers again")
            return
        text, kept_because = straggler.text(host()), kept_because if self.excludes else ""
        facts |= {"part": straggler.part, "factor": round(straggler.factor, 3), "since": straggler.since}
        action = "exclude" if self.excludes and not kept_because else "warn"
        self.events.write("straggler", **facts, action=action, reason=text, kept_because=kept_because)
        self.say(f"step {step:,}: {text}" + (f"; its device stays: {kept_because}" if kept_because else ""))


@dataclass
class ValidationLosses(Observer):
    """Adds validation losses to the rows of every `asked.every`-th step and of the last one. If `ranks_checkpoints`,
    because the run keeps the checkpoints with the lowest loss, also before each checkpoint."""

    trainer: Trainer
    validation: Validation
    ranks_checkpoints: bool

    def after_step(self, step: EndedStep) -> None:
        if step.is_last or step.number % self.validation.every == 0 or (self.ranks_checkpoints and step.is_saved):
            with self.trainer.time.count_block("validation"):
                step.row |= self.trainer.evaluate()


@dataclass
class MetricRows(Observer):
    """Writes the metrics. `beside`: further columns of each row, such as the phase."""

    metrics: MetricsWriter
    saves: Saves
    beside: StepRow

    def after_step(self, step: EndedStep) -> None:
        failing = {"copy_failed": self.saves.failing} if self.saves.failing else {}
        self.metrics.write(step.row | self.beside | failing)

    def close(self) -> None:
        self.metrics.close()


@dataclass
class TerminalView(Observer):
    """Shows progress on the terminal if there is no supervisor."""

    view: Progress
    board: Board

    def after_step(self, step: EndedStep) -> None:
        self.view.poll(self.board)

    def close(self) -> None:
        self.view.close()
