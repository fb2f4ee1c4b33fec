"""What each action and pair of a schedule takes: the instructions of its stages in the order of the two lanes.

Nothing is averaged over stages: a slow stage is slow, and a pair gains what its two stages let it gain.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from compiler.actions.chains import Chains
from compiler.actions.lanes import end_of, least_end
from compiler.actions.order import jobs_of
from compiler.ir import Stage, Use
from compiler.lower import Lowering
from compiler.schedules.schedule import Schedule
from compiler.topology.messages import messages_s
from runtime.actions import Step, actions_of

Key = tuple[tuple[str, int], ...]  # (kind, stage) of an action, or of both of a pair
NS, NS_IN_MS = 10**9, 10**6


@dataclass(frozen=True)
class StepTimes:
    """Prices of a simulation (compiler/schedules/simulate.py) in ms: of whole nanoseconds, so sums are exact."""

    times: Mapping[tuple[Key, int], int]  # of a step, on a pipeline rank
    compute: Mapping[tuple[Key, int], int]  # what of it the compute lane is busy
    exchanges: Mapping[tuple[Key, int], int]  # and the communication lane
    messages: Mapping[tuple[int, int], int]  # of one to a neighbour, by the pipeline ranks that send and receive it

    def check(self, num_ranks: int, num_stages: int) -> None:
        """Do nothing: these times are of the sizes of the schedule they were made for."""

    def of(self, step: Step, rank: int) -> Fraction:
        """Time of a step of the schedule."""
        return Fraction(self.times[key_of(step), rank], NS_IN_MS)

    def message(self, source: int, target: int) -> Fraction:
        """Time of a message from a pipeline rank to another."""
        return Fraction(self.messages[source, target], NS_IN_MS)

    def computed_s(self, steps: Iterable[Step], rank: int) -> float:
        """What a rank computes in some steps."""
        return sum(self.compute[key_of(step), rank] for step in steps) / NS

    def exchanged_s(self, step: Step, rank: int) -> float:
        """What a rank exchanges in a step."""
        return self.exchanges[key_of(step), rank] / NS

    def longer(self, factor: float) -> StepTimes:
        """The times, longer by a factor of at least 1; those of messages are left as they are."""
        lanes = self.times, self.compute, self.exchanges
        times, compute, exchanges = ({key: round(time * factor) for key, time in t.items()} for t in lanes)
        return StepTimes(times, compute, exchanges, self.messages)


def key_of(step: Step) -> Key:
    """What the time of a step depends on, beside its rank."""
    return tuple((action.kind, action.stage) for action in actions_of(step))


def step_times(lowering: Lowering, schedule: Schedule, least: bool = False) -> StepTimes:
    """Times of all steps of a schedule on a plan's stages.

    `least`: what each step takes in any order of its instructions at least, which is found much sooner.
    """
    steps = _Steps(lowering, least)
    times = {
        (key, rank): steps.spans(key, rank)
        for rank, row in enumerate(schedule.actions)
        for key in sorted({key_of(step) for step in row})
    }
    between = messages_s(lowering.rates[0].fabric, lowering.plan, schedule.stage_placement)
    whole, compute, exchanges = ({key: each[k] for key, each in times.items()} for k in range(3))
    return StepTimes(whole, compute, exchanges, {ends: round(time_s * NS) for ends, time_s in between.items()})


class _Steps:
    """What steps take on a plan's stages. Twins among stages, and ranks on one kind of device, are looked at once."""

    def __init__(self, lowering: Lowering, least: bool) -> None:
        self._lowering, self._least = lowering, least
        self._twins = twins_of(lowering.plan.stages)
        self._spans: dict[tuple[Key, int], tuple[int, int, int]] = {}  # by kind of device

    def spans(self, key: Key, rank: int) -> tuple[int, int, int]:
        """Nanoseconds until the last instruction of a step has ended, and those that each of the lanes is busy: for
        compute, and for exchanges."""
        alike = _alike(key, self._twins), self._lowering.kinds[rank]
        if alike not in self._spans:
            self._spans[alike] = self._new_spans(*alike)
        return self._spans[alike]

    def _new_spans(self, key: Key, rank: int) -> tuple[int, int, int]:
        lowering, rates = self._lowering, self._lowering.rates[rank]
        chains = [lowering.chains(stage, rank).of(kind) for kind, stage in key]
        if not any(node.exchanges for chain in chains for node in chain):
            plan = lowering.plan
            chains = [
                Chains(plan.stages[stage], plan.cuts, rates.undivided, plan.sharded).of(kind) for kind, stage in key
            ]
        jobs = jobs_of(chains)
        end = least_end(jobs) if self._least else end_of(jobs, lowering.orders.best(jobs))
        busy = jobs.total(exchange=False), jobs.total(exchange=True)
        return round(end * (rates.pair if len(key) > 1 else 1.0)), *busy


def twins_of(stages: Iterable[Stage]) -> dict[int, tuple[int, ...]]:
    """Stage → the stages that run the very same segments and exchanges, ascending."""
    alike: dict[Hashable, list[int]] = {}
    for stage in stages:
        alike.setdefault(_shape(stage), []).append(stage.index)
    return {stage: tuple(group) for group in alike.values() for stage in group}


def lane_seconds(lowering: Lowering, stage: int, rank: int) -> tuple[float, float]:
    """Seconds that a micro-batch holds the compute lane and the communication lane of a rank, there and back."""
    held = [node for kind in "FB" for node in lowering.chains(stage, rank).of(kind)]
    compute, exchange = (sum(node.time_ns for node in held if node.exchanges == lane) / NS for lane in (False, True))
    return compute, exchange


def _alike(key: Key, twins: Mapping[int, tuple[int, ...]]) -> Key:
    """The key of which this one is a twin. Two stages stay two: weight gradients of one stage wait for each other."""
    (first, stage), *rest = key
    return (
        (first, twins[stage][0]),
        *((kind, twins[other][other != stage and twins[other] == twins[stage]]) for kind, other in rest),
    )


def _shape(stage: Stage) -> Hashable:
    return tuple(
        (
            step.segment.key if isinstance(step, Use) else (step.kind, tuple((b.shape, b.dtype) for b in step.sizes)),
            step.again,
        )
        for step in stage.steps
    )
