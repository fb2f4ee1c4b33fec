"""What a schedule takes under costs, and how far that is from the best: the numbers that are printed and compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from compiler.schedule.bound import bound_of_unequal, lower_bound
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Timeline, simulate
from runtime.contract.actions import Action, Pair


@dataclass(frozen=True)
class MeasuredSchedule:
    """A schedule run under costs. Times are in the unit of the costs, activations are those of one of its stages."""

    schedule: Schedule
    costs: Costs  # of its actions
    timeline: Timeline
    cap: Fraction  # activations a rank may hold, the one that may most: what was asked for, or this schedule holds
    lower_bound: Fraction  # of every schedule of this placement and these sizes within `cap`

    @property
    def makespan(self) -> Fraction:
        return self.timeline.makespan

    @property
    def idle(self) -> Fraction:
        """The share of the step in which ranks do nothing, over all ranks."""
        return sum(self.timeline.idle, Fraction(0)) / (self.makespan * self.schedule.num_ranks)

    @property
    def gap(self) -> Fraction:
        """How much longer than the lower bound it takes, as a share of the bound."""
        return self.makespan / self.lower_bound - 1

    @property
    def excess(self) -> Fraction:
        """The makespan less the steady state: an F&B of every stage and micro-batch of the rank that has most."""
        alike = replace(self.costs, micro_batches=())
        steady = max(
            sum(
                alike.of(Pair(Action("F", s, 0), Action("B", s, 1)), rank) * _load(self.schedule, self.costs, rank, s)
                for s in self.schedule.stages_of(rank)
            )
            for rank in range(self.schedule.num_ranks)
        )
        return self.makespan - steady

    @property
    def peak_activations(self) -> Fraction:
        """The most that a rank holds."""
        return max(self.timeline.peak_activations)

    @property
    def peak_bytes(self) -> tuple[Fraction, ...]:
        """By rank, the most that it holds, with what is beside activations; () where nobody knows."""
        held = self.costs.bytes.held(self.timeline.peak_activations)
        return held if self.costs.bytes.activation else ()

    @property
    def stages_a_rank(self) -> int:
        """Parts into which the model's share of a rank is cut: 1 where a rank has two copies of other stages."""
        return self.schedule.stage_placement.stages_per_rank

    @property
    def copies(self) -> int:
        """Copies of every stage's parameters."""
        return self.schedule.stage_placement.copies


def measure(schedule: Schedule, costs: Costs, cap: Fraction | tuple[Fraction, ...] | None = None) -> MeasuredSchedule:
    """Simulate a checked schedule and bound what could be; ScheduleError where its ranks wait in a circle.

    `cap`: of every rank, or one for each. None: the bound is that of schedules that hold no more than this one.
    """
    timeline = simulate(schedule, costs)
    held = max(timeline.peak_activations) if cap is None else cap
    sizes = schedule.stage_placement, schedule.num_ranks, schedule.num_micro_batches, costs
    bound = bound_of_unequal(*sizes) if costs.micro_batches else lower_bound(*sizes, held)
    return MeasuredSchedule(schedule, costs, timeline, max(held) if isinstance(held, tuple) else held, bound)


def _load(schedule: Schedule, costs: Costs, rank: int, stage: int) -> Fraction:
    """Micro-batches on which a rank runs one of its stages, each as often as it weighs."""
    count = schedule.num_micro_batches
    turn = min(schedule.turn, count)
    runs_first = schedule.rank_of(stage, 0) == rank
    begin, end = (0, turn) if runs_first else (turn, count)
    return sum(costs.micro_batches[begin:end], Fraction(0)) if costs.micro_batches else Fraction(end - begin)
