"""Whether a step may change the weights: a pure function of numbers that all ranks have alike, so all decide alike.

Loss and gradient norm of a step are summed over the world before the optimizer runs, so a decision takes no collective.
A spike is a number that is many standard deviations above the mean of the steps before it, as in OLMo 2
(arXiv 2501.00656): at least half a window of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from runtime.checkpoint import durable_files as files
from runtime.checkpoint.shard_manifest import CHECKPOINTS, Manifest, manifests
from runtime.contract.recipe import Action, Health
from runtime.data.cuts import Ranges
from runtime.data.position import Position
from runtime.system.lines import read_bytes
from runtime.system.outcome import ReportedError

MOST_STEPS = 10_000  # that a run remembers
_MAX = 1 << 62


class Trained(NamedTuple):
    """A step that was trained: its first sample, its loss and its gradient norm."""

    first: int
    loss: float
    norm: float


@dataclass(frozen=True)
class Recent:
    """What a run remembers, and its checkpoints hold: its last steps, the oldest first; the steps at which it skipped a
    batch or rolled back; and the number of its rollbacks so far."""

    steps: tuple[Trained, ...] = ()
    acted: tuple[int, ...] = ()
    rollbacks: int = 0

    def after(self, step: Trained, health: Health) -> Recent:
        """What is remembered behind one more step."""
        most = max(health.window, health.back)
        return replace(self, steps=(*self.steps, step)[-most:])

    def acting(self, step: int) -> Recent:
        """What is remembered behind a skip or a rollback at a step."""
        return replace(self, acted=(*self.acted, step)[-MOST_STEPS:])

    def to_json(self) -> dict[str, Any]:
        """The fields; nothing of a run that remembers nothing."""
        found = {"steps": [[*each] for each in self.steps], "acted": [*self.acted], "rollbacks": self.rollbacks}
        return found if self != Recent() else {}

    @staticmethod
    def from_json(value: Any) -> Recent:
        """The inverse of `to_json`. ValueError for anything else."""
        if value in (None, {}):
            return Recent()
        try:
            steps, acted, rollbacks = value["steps"], value["acted"], value["rollbacks"]
            sound = len(value) == 3 and len(steps) <= MOST_STEPS >= len(acted)
            sound = sound and all(map(_is_count, (rollbacks, *acted, *(first for first, _, _ in steps))))
            sound = sound and all(type(n) is float and math.isfinite(n) for _, *numbers in steps for n in numbers)
        except (TypeError, ValueError, KeyError):
            sound = False
        if not sound:
            raise ValueError("does not say what its run remembers of its steps")
        return Recent(tuple(Trained(*each) for each in steps), tuple(acted), rollbacks)


@dataclass(frozen=True)
class Verdict:
    """Why a step must not change the weights, and what follows."""

    action: Action
    reason: str


class BadStepError(ReportedError):
    """A step that must not change the weights, on every rank alike, of the `samples` [first, end).

    Of a rollback, `to` is the step that it goes back behind, and the samples are all since then. `prints`: of a step
    that was computed again, a fingerprint of each rank's numbers. `before`: other samples on which an earlier start of
    the run failed at the same step: then the weights are at fault, and no samples need to be left out.
    """

    prints: tuple[int, ...] = ()

    def __init__(
        self,
        step: int,
        verdict: Verdict,
        loss: float,
        norm: float,
        samples: tuple[int, int],
        to: int | None = None,
        before: tuple[int, int] | None = None,
    ) -> None:
        how = "to leave these samples out: dsc train --resume --skip-batch"
        if before is not None:
            how = (
                f"the same step failed on samples {before[0]} to {before[1] - 1}, too, so the weights have diverged "
                "and other samples will not help: lower `rate` or `clip`, and go on from an earlier checkpoint"
            )
        if to is not None:
            how = f"the run goes back behind step {to:,}, and on without samples {samples[0]:,} to {samples[1] - 1:,}"
        met = f"{verdict.reason}, on samples {samples[0]} to {samples[1] - 1}" if to is None else verdict.reason
        super().__init__(f"step {step}: {met}; nothing was updated; {how}")
        self.step, self.verdict, self.loss, self.norm, self.samples, self.to = step, verdict, loss, norm, samples, to

    def after(self, before: tuple[int, int] | None) -> BadStepError:
        """Return this error as it is where the same step failed before, on other samples."""
        if before is None or self.to is not None:
            return self
        return BadStepError(self.step, self.verdict, self.loss, self.norm, self.samples, before=before)


def judge(health: Health | None, recent: Recent, step: int, loss: float, norm: float) -> Verdict | None:
    """Why a step must not change the weights, and what follows; None if it may. `health`: None without such a block.

    With such a block, a gradient norm of 0 beside a loss is like one that is not finite: an RMSNorm whose squares
    overflow divides by infinity, so what is behind it is 0, and no gradient comes back.
    """
    numbers = f"loss {loss:.6g}, gradient norm {norm:.6g}"
    if not math.isfinite(loss) or not math.isfinite(norm):
        verdict = Verdict(health.not_finite if health else "stop", numbers)
    elif health and norm == 0 < loss:
        verdict = Verdict(
            health.not_finite, f"{numbers}: squares in norms that are too large for their format give zeros"
        )
    elif health and health.spike and (reason := _spike(health, recent, loss, norm)):
        verdict = Verdict(health.spike.action, f"{numbers}: {reason}")
    else:
        return None
    if health is None or verdict.action == "stop":
        return verdict
    lately = sum(at > step - health.window for at in recent.acted)
    if lately < health.most:
        return verdict
    return Verdict("stop", f"{verdict.reason}; {lately} skips or rollbacks in {health.window} steps were not enough")


def _spike(health: Health, recent: Recent, loss: float, norm: float) -> str:
    """What makes these numbers a spike; "" if nothing does."""
    steps, spike = recent.steps[-health.window :], health.spike
    if spike is None or len(steps) < max(2, health.window // 2):
        return ""
    for name, value, most, before in (
        ("loss", loss, spike.loss, [each.loss for each in steps]),
        ("gradient norm", norm, spike.norm, [each.norm for each in steps]),
    ):
        mean, deviation = _moments(before)
        if most is not None and value > mean + most * deviation:
            above = f"{(value - mean) / deviation:.1f} standard deviations" if deviation else "more than nothing"
            return f"the {name} is {above} above the mean of {len(steps)} steps, {mean:.6g}"
    return ""


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of finite values."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX


# --- health.json of a run: batches that ended it, for `--skip-batch` to leave out, and its rollbacks
#
#     {"batches": [{"order": {…}, "step": 5, "samples": [32, 39], "reason": "loss nan, …"}],
#      "rollbacks": [{"order": {…}, "step": 57, "samples": [288, 455], "to": 36}]}
#
# Samples are numbered in the order of one text and one seed, so batches of another order are not those of this run. A
# rollback is written before the run ends by it. From then on the checkpoints behind the step that it goes back to that
# do not count it are of a training that was given up: whatever kills the run, the next start goes on from one before.

FILE = "health.json"
LATEST = "LATEST"


@dataclass(frozen=True)
class Rollback:
    """At `step` the run went back behind the step `to`, and on without the `samples` [first, end) of an order."""

    order: Mapping[str, Any]
    step: int
    samples: tuple[int, int]
    to: int


def identity(position: Position, data: str) -> dict[str, Any]:
    """What the numbers of samples refer to. `data`: sha256 of the prepared corpus."""
    assert position.order is not None
    return {"data": data, **position.order.to_json()}


def record(run: Path, order: Mapping[str, Any], bad: BadStepError) -> None:
    """Add a batch, or a rollback, and wait for the disk. OSError if the file cannot be written."""
    row = {"order": order, "step": bad.step, "samples": [bad.samples[0], bad.samples[1] - 1]}
    found: dict[str, list[dict[str, Any]]] = {"batches": _rows(run, "batches"), "rollbacks": _rows(run, "rollbacks")}
    if bad.to is None:
        same = (order, row["samples"])
        kept = [each for each in found["batches"] if (each["order"], each["samples"]) != same]
        found["batches"] = [*kept, row | {"reason": bad.verdict.reason}]
    else:
        found["rollbacks"].append(row | {"to": bad.to})
    with files.open_folder(run, follow=True) as opened:
        files.replace(opened, FILE, json.dumps(found) + "\n")
        files.sync(opened)


def forget(run: Path) -> None:
    """Remove what was recorded of a training, where another one begins. OSError."""
    (run / FILE).unlink(missing_ok=True)


def read(run: Path, order: Mapping[str, Any]) -> Ranges:
    """[first, end) of the samples of each recorded batch; none where no batch of this order is recorded."""
    return tuple(_samples(row) for row in _rows(run, "batches") if row["order"] == order)


def failed_before(run: Path, order: Mapping[str, Any], bad: BadStepError) -> tuple[int, int] | None:
    """Return other samples [first, end) on which the run failed at the same step, if there are any."""
    rows = (row for row in _rows(run, "batches") if row["order"] == order and row["step"] == bad.step)
    return next((samples for row in rows if (samples := _samples(row)) != bad.samples), None)


def rollbacks(run: Path) -> tuple[Rollback, ...]:
    """The rollbacks of a run, the first one first."""
    return tuple(Rollback(row["order"], row["step"], _samples(row), row["to"]) for row in _rows(run, "rollbacks"))


def give_up(run: Path) -> None:
    """Put away the checkpoints of trainings that were given up: the next save removes them. OSError."""
    done, folder = rollbacks(run), run / CHECKPOINTS
    found = [(path.name, is_given_up(manifest, done)) for path, manifest in manifests(folder)[0]] if done else []
    if not any(gone for _, gone in found):
        return
    with files.open_folder(folder, follow=True) as opened:
        for name, gone in found:
            if gone:
                with suppress(FileNotFoundError):  # another rank did it
                    files.rename(opened, name, f".purge-{name}")
        files.sync(opened)


def going_back(run: Path, position: Position, recent: Recent, data: str) -> tuple[Position, Recent, str]:
    """Where a run goes on behind its newest checkpoint: with what it gave up since left out; and what to say of it."""
    more = rollbacks(run)[recent.rollbacks :]
    if not more:
        return position, recent, ""
    order = identity(position, data)
    spans = [each.samples for each in more if each.order == order]
    recent = replace(recent, rollbacks=recent.rollbacks + len(more))
    for each in more:
        recent = recent.acting(each.step)
    said = ", ".join(f"{first:,} to {end - 1:,}" for first, end in spans)
    return (
        position.skipping(spans),
        recent,
        f"rolled back at step {more[-1].step:,}: samples {said or 'none'} are left out",
    )


def is_given_up(manifest: Manifest, done: Sequence[Rollback]) -> bool:
    """Whether a checkpoint is of a training that was given up by one of the rollbacks `done` of its run."""
    told = manifest.meta.get("health")
    seen = told.get("rollbacks", 0) if isinstance(told, dict) else 0
    later = done[seen:] if type(seen) is int and seen >= 0 else done
    return any(manifest.step > each.to for each in later)


def _samples(row: Mapping[str, Any]) -> tuple[int, int]:
    first, last = row["samples"]
    return first, last + 1


def _rows(run: Path, kind: str) -> list[dict[str, Any]]:
    """The rows of a kind; none of a file that is not what `record` wrote."""
    try:
        rows = json.loads(read_bytes(run / FILE))[kind]
        return [row for row in rows if _is_row(row, {"to"} if kind == "rollbacks" else set())]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _is_row(row: Mapping[str, Any], more: set[str]) -> bool:
    first, last = row["samples"]
    counts = (first, last, row["step"], *(row[name] for name in more))
    return all(type(each) is int and 0 <= each < 1 << 62 for each in counts) and first <= last
