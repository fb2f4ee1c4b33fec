"""How much of the reductions of gradients runs under the backward, and what is left of them behind it.

A reduction starts when the last of its ranks starts it, and takes the time in which a rank's links are free: between
its steps all of it, in a step what its exchanges and messages leave.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from compiler.ir import Plan
from compiler.predict.times import StepTimes
from compiler.program.lower.reductions import Stages, reductions_of
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Timeline

Reductions = Mapping[tuple[tuple[int, ...], Stages], float]  # (pipeline ranks, stages) → seconds of their buckets


def left_of_reductions(
    plan: Plan, schedule: Schedule, times: StepTimes, timeline: Timeline, seconds: Reductions
) -> list[float]:
    """Seconds by which the reductions of each pipeline rank go on behind the last action of all. O(steps that follow
    the start of one)."""
    unit, done = float(timeline.unit) / 1000, [0.0] * schedule.num_ranks
    makespan = max((row[-1][1] * unit for row in timeline.ticks if row), default=0.0)
    for (ranks, _), (_, end) in reduction_spans(plan, schedule, times, timeline, seconds).items():
        for rank in ranks:
            done[rank] = max(done[rank], end)
    return [max(0.0, each - makespan) for each in done]


def reduction_spans(
    plan: Plan, schedule: Schedule, times: StepTimes, timeline: Timeline, seconds: Reductions
) -> dict[tuple[tuple[int, ...], Stages], tuple[float, float]]:
    """When each reduction starts and ends, in seconds of the step."""
    lanes = [_Lane(schedule, times, timeline, rank) for rank in range(schedule.num_ranks)]
    starts: dict[tuple[tuple[int, ...], Stages], float] = {}
    for rank, row in enumerate(reductions_of(plan, schedule.actions)):
        of_stages = {stages: lanes[rank].ends[after] for after, stages in row}
        for ranks, stages in seconds:
            if rank in ranks:
                starts[ranks, stages] = max(starts.get((ranks, stages), 0.0), of_stages[stages])
    done, spans = [0.0] * schedule.num_ranks, {}
    for ranks, stages in sorted(seconds, key=lambda key: (starts[key], key)):
        begin = max(starts[ranks, stages], *(done[rank] for rank in ranks))
        end = max(lanes[rank].end_of(begin, seconds[ranks, stages]) for rank in ranks)
        spans[ranks, stages] = begin, end
        for rank in ranks:
            done[rank] = end
    return spans


class _Lane:
    """The links of a rank over a step: in each span, which share of the time exchanges leave free."""

    def __init__(self, schedule: Schedule, times: StepTimes, timeline: Timeline, rank: int) -> None:
        unit = float(timeline.unit) / 1000  # seconds
        self.starts = [start * unit for start, _ in timeline.ticks[rank]]
        self.ends = [end * unit for _, end in timeline.ticks[rank]]
        self._steps, self._times, self._rank = schedule.actions[rank], times, rank

    def end_of(self, begin: float, seconds: float) -> float:
        """When something that begins then, and needs the links for so long, has ended."""
        now, left = begin, seconds
        for at in range(bisect_right(self.ends, begin), len(self.ends)):
            idle = max(0.0, self.starts[at] - now)
            if left <= idle:
                return now + left
            now, left = now + idle, left - idle
            span = self.ends[at] - self.starts[at]
            free = max(0.0, 1 - self._times.exchanged_s(self._steps[at], self._rank) / span) if span else 0.0
            if left <= free * (self.ends[at] - now):
                return now + left / free
            now, left = self.ends[at], left - free * (self.ends[at] - now)
        return now + left
