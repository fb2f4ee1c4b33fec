"""Checks a step before it changes the weights, and remembers recent steps for that."""

from __future__ import annotations

from torch import Tensor

from runtime.contract.recipe import TrainRecipe
from runtime.observe.health.judge import BadStepError, JudgedStep, RecentSteps, Verdict, judge
from runtime.observe.health.rerun import Fault, RerunStep


class HealthWatch:
    """Judges the steps of a rank. `recent`: its memory; `faults`: faults that are not reported yet."""

    def __init__(self, train: TrainRecipe, recent: RecentSteps) -> None:
        self._health, self._first_step = train.health, train.first_step
        self.recent, self.faults = recent, list[Fault]()
        self._left_out = 0  # batches skipped since the last trained step
        self._prints: tuple[int, ...] = ()  # fingerprints of each rank in the last recomputed step

    @property
    def reruns(self) -> bool:
        """Whether a bad step is recomputed."""
        return self._health is not None and self._health.rerun

    def verdict(self, step: int, loss: float, norm: float) -> Verdict | None:
        """Return why a step must not change the weights; None if it may."""
        return judge(self._health, self.recent, step, loss, norm)

    def record_rerun(self, rerun: RerunStep) -> dict[str, Tensor]:
        """Record a recomputed step, and return its sums."""
        self.faults += [rerun.fault] if rerun.fault else []
        self._prints = rerun.prints
        return rerun.sums

    def check(self, step: int, loss: float, norm: float, drawn: tuple[int, int]) -> int:
        """Record a step on the samples [first, end) that is about to change the weights. Return the number of batches
        skipped before it. Raises BadStepError, on all ranks, if the step is bad."""
        prints, self._prints = self._prints, ()
        if (verdict := self.verdict(step, loss, norm)) is not None:
            bad = self._bad(step, verdict, (loss, norm), drawn)
            bad.prints = prints
            raise bad
        if self._health:
            self.recent = self.recent.after(JudgedStep(drawn[0], loss, norm), self._health)
        left_out, self._left_out = self._left_out, 0
        return left_out

    def leave_out(self, step: int) -> None:
        """Record that the batch of a step was skipped."""
        self.recent, self._left_out = self.recent.after_action(step), self._left_out + 1

    def _bad(self, step: int, verdict: Verdict, numbers: tuple[float, float], drawn: tuple[int, int]) -> BadStepError:
        if verdict.action != "rollback" or self._health is None:
            return BadStepError(step, verdict, *numbers, drawn)
        back = min(self._health.back, len(self.recent.steps), step - 1 - self._first_step)
        first = self.recent.steps[-back].first if back else drawn[0]
        return BadStepError(step, verdict, *numbers, (first, drawn[1]), step - 1 - back)
