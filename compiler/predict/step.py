"""The time of a step: its schedule, simulated at the times of its actions, and its tail."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from statistics import fmean

from compiler.predict.prediction import RankTime, StepPrediction, Tail
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Timeline
from runtime.contract.actions import Pair, is_copy

# Lone action → its row in arXiv 2505.09343, table 4, where a backward for the inputs counts as a backward.
ROWS = {"F": "forward_s", "B": "backward_s", "I": "backward_s", "W": "weight_s"}


def rank_times(schedule: Schedule, timeline: Timeline, tail_s: float) -> tuple[RankTime, ...]:
    """The rows of each pipeline rank. They sum to the step: time without an action or the tail is bubble."""
    unit = float(timeline.unit) / 1000  # in seconds
    makespan = int(timeline.makespan / timeline.unit)  # in whole ticks, so that the bubble has no rounding error
    ranks = []
    for rank, (steps, ticks) in enumerate(zip(schedule.actions, timeline.ticks, strict=True)):
        rows = dict.fromkeys(("forward_s", "backward_s", "weight_s", "overlapped_s"), 0)
        for step, (start, end) in zip(steps, ticks, strict=True):
            if is_copy(step):
                continue  # copies run beside compute
            rows["overlapped_s" if isinstance(step, Pair) else ROWS[step.kind]] += end - start
        rows["bubble_s"] = makespan - sum(rows.values())
        ranks.append(RankTime(rank, **{row: ticks * unit for row, ticks in rows.items()}, optimizer_s=tail_s))
    return tuple(ranks)


def mean_of(ranks: Sequence[RankTime]) -> RankTime:
    """Each row's mean over the pipeline ranks."""
    rows = ("forward_s", "backward_s", "weight_s", "overlapped_s", "bubble_s", "optimizer_s")
    row_means = {row: fmean(getattr(rank, row) for rank in ranks) for row in rows}
    return RankTime(-1, **row_means)


def step_of(schedule: Schedule, timeline: Timeline, tails: Sequence[Tail], tokens: int) -> StepPrediction:
    """The step of a schedule. All ranks begin the tail together, so the slowest tail counts for all."""
    tail = max(tails, key=lambda tail: tail.seconds)
    ranks = rank_times(schedule, timeline, tail.seconds)
    return StepPrediction(
        seconds=float(timeline.makespan) / 1000 + tail.seconds,
        tokens=tokens,
        schedule=schedule.name,
        num_micro_batches=schedule.num_micro_batches,
        mean=mean_of(ranks),
        ranks=ranks,
        tail=tail,
        # Another order may hide more of the reductions.
        bound_s=float(busiest_rank_work(timeline)) / 1000 + tail.seconds - tail.reduction_s,
    )


def busiest_rank_work(timeline: Timeline) -> Fraction:
    """A lower bound of any order of these steps: the work of the busiest rank."""
    return timeline.makespan - min(timeline.idle)
