"""The time of each action and pair of a schedule, from the instructions of its stages in their two-lane order.

Nothing is averaged over stages: each action has the time of its own stage, and each pair the gain of its two stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Generic, TypeVar

from compiler.ir import Plan
from compiler.machine.topology.traffic import RankOf, messages_of
from compiler.plan.actions.chains import ChainNode
from compiler.plan.actions.lanes import OrderEnd
from compiler.plan.actions.order import least_of_chains, paces, run_of_chains
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import copy_ns
from compiler.program.lower.lowering import Stages, reductions_of
from compiler.program.lower.twins import Key, key_of_twins, twins_of
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Timeline
from runtime.contract.actions import Pair, Step, actions_of, is_copy

NS, NS_IN_MS = 10**9, 10**6


@dataclass(frozen=True)
class StepTimes:
    """Prices for a simulation (compiler/schedule/simulate.py), in ms. They are whole nanoseconds, so sums are exact."""

    times: Mapping[tuple[Key, int], int]  # of a step on a pipeline rank
    compute: Mapping[tuple[Key, int], int]  # for which its compute lane is busy
    exchanges: Mapping[tuple[Key, int], int]  # for which its communication lane is busy, with messages to other ranks

    @property
    def micro_batches(self) -> tuple[Fraction, ...]:
        """Factors of micro-batches: none, as all are alike."""
        return ()

    @property
    def keeps(self) -> Fraction:
        """The share of an activation that is kept until its W: all of it."""
        return Fraction(1)

    def check(self, num_ranks: int, num_stages: int, num_micro_batches: int | None = None) -> None:
        """Do nothing: these times were made for a schedule of the right sizes."""

    def step_time(self, step: Step, rank: int) -> Fraction:
        """Time of a step of the schedule."""
        return Fraction(self.times[key_of(step), rank], NS_IN_MS)

    def message(self, source: int, target: int) -> Fraction:
        """Time of a message after the step that sends it: 0, as the step ends when its message has arrived."""
        return Fraction(0)

    def compute_s(self, steps: Iterable[Step], rank: int) -> float:
        """Seconds that a rank computes in these steps."""
        return sum(self.compute[key_of(step), rank] for step in steps) / NS

    def exchange_s(self, step: Step, rank: int) -> float:
        """Seconds that a rank exchanges in a step."""
        return self.exchanges[key_of(step), rank] / NS

    def longer(self, factor: float) -> StepTimes:
        """The times, longer by a factor of at least 1."""
        lanes = self.times, self.compute, self.exchanges
        return StepTimes(*({key: round(time * factor) for key, time in t.items()} for t in lanes))


def key_of(step: Step) -> Key:
    """The kinds and stages of a step, which decide its time on a rank."""
    return tuple((action.kind, action.stage) for action in actions_of(step))


def step_times(lowering: Lowering, schedule: Schedule, least: bool = False) -> StepTimes:
    """Times of all steps of a schedule on a plan's stages.

    `least`: instead, lower bounds for any order of a step's instructions, which are found much faster.
    """
    steps = StepRuns(lowering, schedule, least_of_chains if least else partial(run_of_chains, orders=lowering.orders))
    times = {
        (key, rank): _run_of_step(steps, step, rank)
        for rank, row in enumerate(schedule.actions)
        for key, step in sorted({key_of(step): step for step in row}.items())
    }
    return StepTimes(
        {key: run.end for key, run in times.items()},
        {key: run.compute for key, run in times.items()},
        {key: run.exchange for key, run in times.items()},
    )


Result = TypeVar("Result")
RunChains = Callable[[Sequence[Sequence[ChainNode]], Sequence[int]], Result]  # (chains, time of each one's message)


class StepRuns(Generic[Result]):
    """What `run` says of the steps of a schedule. Equal stages, and ranks on the same kind of device, are run once."""

    def __init__(self, lowering: Lowering, schedule: Schedule, run: RunChains[Result]) -> None:
        self.lowering, self._schedule, self._run = lowering, schedule, run
        self._messages = messages_of(lowering.rates[0].fabric, lowering.plan, schedule.stage_placement)
        self._twins = twins_of(lowering.plan.stages)
        self._runs: dict[tuple[Key, int, tuple[int, ...]], Result] = {}  # by kind of device, and messages

    def of(self, step: Step, rank: int) -> Result:
        """The result of a step on a pipeline rank. A step that copies activations has none."""
        sends = tuple(
            self._messages.sent_ns(a.kind, a.stage, self._schedule.num_stages, self._rank_of(a.micro_batch))
            for a in actions_of(step)
        )
        key, kind = key_of_twins(key_of(step), self._twins), self.lowering.kinds[rank]
        if (key, kind, sends) not in self._runs:
            chains = [self.lowering.chains(stage, kind).chain(name) for name, stage in key]
            self._runs[key, kind, sends] = self._run(chains, sends)
        return self._runs[key, kind, sends]

    def _rank_of(self, micro_batch: int) -> RankOf:
        return lambda stage: self._schedule.rank_of(stage, micro_batch)


def _run_of_step(runs: StepRuns[OrderEnd], step: Step, rank: int) -> OrderEnd:
    """The time of a step, until its last instruction has ended and its messages have arrived."""
    lowering = runs.lowering
    if is_copy(step):
        (action,) = actions_of(step)
        return OrderEnd(copy_ns(lowering.chains(action.stage, rank)), 0, 0)
    run = runs.of(step, rank)
    return replace(run, end=round(run.end * (lowering.rates[rank].pair if isinstance(step, Pair) else 1.0)))


def lane_seconds(lowering: Lowering, stage: int, rank: int) -> tuple[float, float]:
    """Seconds for which a micro-batch occupies the compute and communication lanes of a rank, in both phases."""
    lanes = {False: 0, True: 0}
    for chain in (lowering.chains(stage, rank).chain(kind) for kind in "FB"):
        nodes = [node for node in chain if node.uses_lane]
        for node, time_ns in zip(nodes, paces(nodes, 1)[1], strict=True):
            lanes[node.is_exchange] += time_ns
    return lanes[False] / NS, lanes[True] / NS


# --- How much of the reductions of gradients overlaps with the backward, and how much is left after it
#
# A reduction starts when the last of its ranks starts it. It uses the time in which a rank's links are free: all of the
# time between steps, and in a step the time that exchanges and messages leave.

Reductions = Mapping[tuple[tuple[int, ...], Stages], float]  # (pipeline ranks, stages) → seconds of their buckets


def exposed_reductions(
    plan: Plan, schedule: Schedule, times: StepTimes, timeline: Timeline, seconds: Reductions
) -> list[float]:
    """Seconds that the reductions of each pipeline rank take after the last action of all ranks.

    Takes O(steps after the first start) time.
    """
    unit, done = float(timeline.unit) / 1000, [0.0] * schedule.num_ranks
    makespan = max((row[-1][1] * unit for row in timeline.ticks if row), default=0.0)
    for (ranks, _), (_, end) in reduction_spans(plan, schedule, times, timeline, seconds).items():
        for rank in ranks:
            done[rank] = max(done[rank], end)
    return [max(0.0, end - makespan) for end in done]


def reduction_spans(
    plan: Plan, schedule: Schedule, times: StepTimes, timeline: Timeline, seconds: Reductions
) -> dict[tuple[tuple[int, ...], Stages], tuple[float, float]]:
    """(start, end) of each reduction, in seconds of the step."""
    lanes = [_LinkLane(schedule, times, timeline, rank) for rank in range(schedule.num_ranks)]
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


class _LinkLane:
    """The links of a rank over a step, with the share of each span that exchanges leave free."""

    def __init__(self, schedule: Schedule, times: StepTimes, timeline: Timeline, rank: int) -> None:
        unit = float(timeline.unit) / 1000  # seconds
        self.starts = [start * unit for start, _ in timeline.ticks[rank]]
        self.ends = [end * unit for _, end in timeline.ticks[rank]]
        self._steps, self._times, self._rank = schedule.actions[rank], times, rank

    def end_of(self, begin: float, seconds: float) -> float:
        """When a transfer ends that begins at `begin` and needs the links for `seconds`."""
        time_s, needed_s = begin, seconds
        for index in range(bisect_right(self.ends, begin), len(self.ends)):
            idle = max(0.0, self.starts[index] - time_s)
            if needed_s <= idle:
                return time_s + needed_s
            time_s, needed_s = time_s + idle, needed_s - idle
            span = self.ends[index] - self.starts[index]
            free = max(0.0, 1 - self._times.exchange_s(self._steps[index], self._rank) / span) if span else 0.0
            if needed_s <= free * (self.ends[index] - time_s):
                return time_s + needed_s / free
            time_s, needed_s = self.ends[index], needed_s - free * (self.ends[index] - time_s)
        return time_s + needed_s
