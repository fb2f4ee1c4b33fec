"""Judges whether a step may change the weights: a pure function of numbers that are equal on all ranks.

Loss and gradient norm of a step are summed over the world before the optimizer runs, so a decision needs no collective.
A spike is a number many standard deviations above the mean of at least half a window of earlier steps, as in OLMo 2
(arXiv 2501.00656).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from runtime.contract.recipe import Action, HealthRecipe
from runtime.system.outcome import ReportedError

MOST_STEPS = 10_000  # most steps that a run remembers
_MAX = 1 << 62


class JudgedStep(NamedTuple):
    """A trained step: its first sample, its loss and its gradient norm."""

    first: int
    loss: float
    norm: float


@dataclass(frozen=True)
class RecentSteps:
    """The memory of a run, which its checkpoints hold: its last steps, oldest first; the steps at which it skipped a
    batch or rolled back; and the number of rollbacks so far."""

    steps: tuple[JudgedStep, ...] = ()
    acted: tuple[int, ...] = ()
    rollbacks: int = 0

    def after(self, step: JudgedStep, health: HealthRecipe) -> RecentSteps:
        """Return the memory after one more step."""
        limit = max(health.window, health.back)
        return replace(self, steps=(*self.steps, step)[-limit:])

    def after_action(self, step: int) -> RecentSteps:
        """Return the memory after a skip or a rollback at a step."""
        return replace(self, acted=(*self.acted, step)[-MOST_STEPS:])

    def to_json(self) -> dict[str, Any]:
        """Return the fields; empty if there is nothing to remember."""
        fields = {"steps": [[*step] for step in self.steps], "acted": [*self.acted], "rollbacks": self.rollbacks}
        return fields if self != RecentSteps() else {}

    @staticmethod
    def from_json(value: Any) -> RecentSteps:
        """Parse the result of `to_json`. ValueError for anything else."""
        if value in (None, {}):
            return RecentSteps()
        try:
            steps, acted, rollbacks = value["steps"], value["acted"], value["rollbacks"]
            sound = len(value) == 3 and len(steps) <= MOST_STEPS >= len(acted)
            sound = sound and all(map(_is_count, (rollbacks, *acted, *(first for first, _, _ in steps))))
            sound = sound and all(type(n) is float and math.isfinite(n) for _, *numbers in steps for n in numbers)
        except (TypeError, ValueError, KeyError):
            sound = False
        if not sound:
            raise ValueError("does not say what its run remembers of its steps")
        return RecentSteps(tuple(JudgedStep(*row) for row in steps), tuple(acted), rollbacks)


@dataclass(frozen=True)
class Verdict:
    """Why a step must not change the weights, and the action to take."""

    action: Action
    reason: str


class BadStepError(ReportedError):
    """A step on the `samples` [first, end) that must not change the weights. All ranks raise it.

    For a rollback, `target_step` is the step after which the run resumes, and the samples are all since then. `prints`:
    a fingerprint of each rank's numbers, if the step was recomputed. `before`: other samples on which an earlier start
    of the run failed at the same step: then the weights are at fault, and skipping samples does not help.
    """

    prints: tuple[int, ...] = ()

    def __init__(
        self,
        step: int,
        verdict: Verdict,
        loss: float,
        norm: float,
        samples: tuple[int, int],
        target_step: int | None = None,
        before: tuple[int, int] | None = None,
    ) -> None:
        consequence = "to leave these samples out: dsc train --resume --skip-batch"
        if before is not None:
            consequence = (
                f"the same step failed on samples {before[0]} to {before[1] - 1}, too, so the weights have diverged "
                "and other samples will not help: lower `rate` or `clip`, and go on from an earlier checkpoint"
            )
        if target_step is not None:
            consequence = (
                f"the run returns to the end of step {target_step:,}, "
                f"and skips samples {samples[0]:,} to {samples[1] - 1:,}"
            )
        reason = (
            f"{verdict.reason}, on samples {samples[0]} to {samples[1] - 1}" if target_step is None else verdict.reason
        )
        super().__init__(f"step {step}: {reason}; nothing was updated; {consequence}")
        self.step, self.verdict, self.loss, self.norm = step, verdict, loss, norm
        self.samples, self.target_step = samples, target_step

    def with_earlier_failure(self, before: tuple[int, int] | None) -> BadStepError:
        """Return this error for the case that the same step failed before, on other samples."""
        if before is None or self.target_step is not None:
            return self
        return BadStepError(self.step, self.verdict, self.loss, self.norm, self.samples, before=before)


def judge(health: HealthRecipe | None, recent: RecentSteps, step: int, loss: float, norm: float) -> Verdict | None:
    """Return why a step must not change the weights, and the action; None if it may. `health`: None without such a
    block.

    With such a block, a gradient norm of 0 with a positive loss counts as not finite: an RMSNorm whose squares overflow
    divides by infinity, so its output is 0, and so are all gradients.
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
    lately = sum(acted_step > step - health.window for acted_step in recent.acted)
    if lately < health.most:
        return verdict
    return Verdict("stop", f"{verdict.reason}; {lately} skips or rollbacks in {health.window} steps were not enough")


def _spike(health: HealthRecipe, recent: RecentSteps, loss: float, norm: float) -> str:
    """Return why these numbers are a spike, or ""."""
    steps, spike = recent.steps[-health.window :], health.spike
    if spike is None or len(steps) < max(2, health.window // 2):
        return ""
    for name, value, limit, before in (
        ("loss", loss, spike.loss, [step.loss for step in steps]),
        ("gradient norm", norm, spike.norm, [step.norm for step in steps]),
    ):
        mean, deviation = _moments(before)
        if limit is not None and value > mean + limit * deviation:
            above = f"{(value - mean) / deviation:.1f} standard deviations" if deviation else "more than 0"
            return f"the {name} is {above} above the mean of {len(steps)} steps, {mean:.6g}"
    return ""


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation of finite values."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX
