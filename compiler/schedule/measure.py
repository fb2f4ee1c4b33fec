"""The makespan of a schedule under costs, and its distance from the best: the numbers that are printed and compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from compiler.schedule.bound import lower_bound
from compiler.schedule.costs import Costs
from compiler.schedule.periods import Totals, time_by_periods
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Prices, Timeline, simulate
from compiler.schedule.unequal_bound import bound_of_unequal
from runtime.contract.actions import Action, Pair


@dataclass(frozen=True)
class MeasuredSchedule:
    """A schedule that was timed under costs. Times are in the unit of the costs, activations those of one stage."""

    schedule: Schedule
    costs: Costs  # of its actions
    totals: Totals | Timeline
    cap: Fraction  # the most activations that any rank may hold: as requested, or as this schedule holds
    lower_bound: Fraction  # of the makespan of all schedules of this placement and these sizes within `cap`

    @cached_property
    def timeline(self) -> Timeline:
        """The times of all steps, for pictures."""
        return self.totals if isinstance(self.totals, Timeline) else simulate(self.schedule, self.costs)

    @property
    def makespan(self) -> Fraction:
        return self.totals.makespan

    @property
    def idle(self) -> Fraction:
        """The share of the step in which ranks are idle, over all ranks."""
        return sum(self.totals.idle, Fraction(0)) / (self.makespan * self.schedule.num_ranks)

    @property
    def gap(self) -> Fraction:
        """How much longer than the lower bound the schedule takes, as a share of the bound."""
        return self.makespan / self.lower_bound - 1

    @property
    def excess(self) -> Fraction:
        """The makespan minus the steady state: an F&B for every stage and micro-batch of the busiest rank."""
        alike = replace(self.costs, micro_batches=())
        steady = max(
            sum(
                alike.step_time(Pair(Action("F", s, 0), Action("B", s, 1)), rank)
                * _load(self.schedule, self.costs, rank, s)
                for s in self.schedule.stages_of(rank)
            )
            for rank in range(self.schedule.num_ranks)
        )
        return self.makespan - steady

    @property
    def peak_activations(self) -> Fraction:
        """The most activations that a rank holds."""
        return max(self.totals.peak_activations)

    @property
    def num_offloaded(self) -> int:
        """The number of activations that go to the host and come back."""
        return sum(map(len, self.totals.copies)) // 2 if isinstance(self.totals, Timeline) else 0

    @property
    def peak_bytes(self) -> tuple[Fraction, ...]:
        """By rank, the most bytes that it holds, in activations and otherwise; () if unknown."""
        peaks = self.costs.bytes.held_bytes(self.totals.peak_activations)
        return peaks if self.costs.bytes.activation else ()

    @property
    def stages_a_rank(self) -> int:
        """The stages into which a rank's share of the model is cut. Mirrored copies do not count."""
        return self.schedule.stage_placement.stages_per_rank

    @property
    def copies(self) -> int:
        """The number of copies of every stage's parameters."""
        return self.schedule.stage_placement.copies


def measure(schedule: Schedule, costs: Costs, cap: Fraction | tuple[Fraction, ...] | None = None) -> MeasuredSchedule:
    """Time a checked schedule and compute its lower bound. Raises ScheduleError if its ranks wait in a circle.

    `cap`: one for all ranks, or one for each. With None, the bound is for schedules that hold no more than this one.
    """
    totals = totals_of(schedule, costs)
    limit = max(totals.peak_activations) if cap is None else cap
    bound_of = bound_of_unequal if costs.micro_batches else lower_bound
    bound = bound_of(schedule.stage_placement, schedule.num_ranks, schedule.num_micro_batches, costs, limit)
    return MeasuredSchedule(schedule, costs, totals, max(limit) if isinstance(limit, tuple) else limit, bound)


def totals_of(schedule: Schedule, prices: Prices) -> Totals | Timeline:
    """The makespan, idle time and activations of a checked schedule. Raises ScheduleError if ranks wait in a circle."""
    return time_by_periods(schedule, prices) or simulate(schedule, prices)


def _load(schedule: Schedule, costs: Costs, rank: int, stage: int) -> Fraction:
    """The sum of the weights of the micro-batches on which a rank runs one of its stages."""
    count = schedule.num_micro_batches
    turn = min(schedule.turn, count)
    runs_first = schedule.rank_of(stage, 0) == rank
    begin, end = (0, turn) if runs_first else (turn, count)
    return sum(costs.micro_batches[begin:end], Fraction(0)) if costs.micro_batches else Fraction(end - begin)
