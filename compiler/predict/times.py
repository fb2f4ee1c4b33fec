"""What each action and pair of a schedule takes: the instructions of its stages in the order of the two lanes.

Nothing is averaged over stages: a slow stage is slow, and a pair gains what its two stages let it gain.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from compiler.ir import Stage, Use
from compiler.machine.topology.messages import RankOf, messages_of
from compiler.plan.actions.lanes import Run
from compiler.plan.actions.order import paces
from compiler.plan.actions.timing import least_of_chains, run_of_chains
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import copy_ns
from compiler.schedule.schedule import Schedule
from runtime.contract.actions import COPIES, Step, actions_of

Key = tuple[tuple[str, int], ...]  # (kind, stage) of an action, or of both of a pair
NS, NS_IN_MS = 10**9, 10**6


@dataclass(frozen=True)
class StepTimes:
    """Prices of a simulation (compiler/schedule/simulate.py) in ms: of whole nanoseconds, so sums are exact."""

    times: Mapping[tuple[Key, int], int]  # of a step, on a pipeline rank
    compute: Mapping[tuple[Key, int], int]  # what of it the compute lane is busy
    exchanges: Mapping[tuple[Key, int], int]  # and the communication lane, messages to other ranks among it

    @property
    def micro_batches(self) -> tuple[Fraction, ...]:
        """No factors: micro-batches are alike."""
        return ()

    @property
    def keeps(self) -> Fraction:
        """All of an activation is counted until its W."""
        return Fraction(1)

    def check(self, num_ranks: int, num_stages: int, num_micro_batches: int | None = None) -> None:
        """Do nothing: these times are of the sizes of the schedule they were made for."""

    def of(self, step: Step, rank: int) -> Fraction:
        """Time of a step of the schedule."""
        return Fraction(self.times[key_of(step), rank], NS_IN_MS)

    def message(self, source: int, target: int) -> Fraction:
        """Time of a message behind the step that sends it: none, for the step ends when it is there."""
        return Fraction(0)

    def computed_s(self, steps: Iterable[Step], rank: int) -> float:
        """What a rank computes in some steps."""
        return sum(self.compute[key_of(step), rank] for step in steps) / NS

    def exchanged_s(self, step: Step, rank: int) -> float:
        """What a rank exchanges in a step."""
        return self.exchanges[key_of(step), rank] / NS

    def longer(self, factor: float) -> StepTimes:
        """The times, longer by a factor of at least 1."""
        lanes = self.times, self.compute, self.exchanges
        return StepTimes(*({key: round(time * factor) for key, time in t.items()} for t in lanes))


def key_of(step: Step) -> Key:
    """What the time of a step depends on, beside its rank."""
    return tuple((action.kind, action.stage) for action in actions_of(step))


def step_times(lowering: Lowering, schedule: Schedule, least: bool = False) -> StepTimes:
    """Times of all steps of a schedule on a plan's stages.

    `least`: what each step takes in any order of its instructions at least, which is found much sooner.
    """
    steps = _Steps(lowering, schedule, least)
    times = {
        (key, rank): steps.run(step, rank)
        for rank, row in enumerate(schedule.actions)
        for key, step in sorted({key_of(step): step for step in row}.items())
    }
    return StepTimes(
        {key: run.end for key, run in times.items()},
        {key: run.compute for key, run in times.items()},
        {key: run.exchange for key, run in times.items()},
    )


class _Steps:
    """What steps take on a plan's stages. Twins among stages, and ranks on one kind of device, are looked at once."""

    def __init__(self, lowering: Lowering, schedule: Schedule, least: bool) -> None:
        self._lowering, self._schedule, self._least = lowering, schedule, least
        self._messages = messages_of(lowering.rates[0].fabric, lowering.plan, schedule.stage_placement)
        self._twins = twins_of(lowering.plan.stages)
        self._runs: dict[tuple[Key, int, tuple[int, ...]], Run] = {}  # by kind of device, and messages

    def run(self, step: Step, rank: int) -> Run:
        """A step until its last instruction has ended, and its messages are there."""
        sends = tuple(
            self._messages.sent_ns(a.kind, a.stage, self._schedule.num_stages, self._rank_of(a.micro_batch))
            for a in actions_of(step)
        )
        alike = _alike(key_of(step), self._twins), self._lowering.kinds[rank], sends
        if alike not in self._runs:
            self._runs[alike] = self._new_run(*alike)
        return self._runs[alike]

    def _rank_of(self, micro_batch: int) -> RankOf:
        return lambda stage: self._schedule.rank_of(stage, micro_batch)

    def _new_run(self, key: Key, rank: int, sends: Sequence[int]) -> Run:
        lowering = self._lowering
        if key[0][0] in COPIES:
            return Run(copy_ns(lowering.chains(key[0][1], rank)), 0, 0)
        chains = [lowering.chains(stage, rank).of(kind) for kind, stage in key]
        found = least_of_chains(chains, sends) if self._least else run_of_chains(chains, sends, lowering.orders)
        return replace(found, end=round(found.end * (lowering.rates[rank].pair if len(key) > 1 else 1.0)))


def twins_of(stages: Iterable[Stage]) -> dict[int, tuple[int, ...]]:
    """Stage → the stages that run the very same segments and exchanges, ascending."""
    alike: dict[Hashable, list[int]] = {}
    for stage in stages:
        alike.setdefault(_shape(stage), []).append(stage.index)
    return {stage: tuple(group) for group in alike.values() for stage in group}


def lane_seconds(lowering: Lowering, stage: int, rank: int) -> tuple[float, float]:
    """Seconds that a micro-batch holds the compute lane and the communication lane of a rank, there and back."""
    lanes = {False: 0, True: 0}
    for chain in (lowering.chains(stage, rank).of(kind) for kind in "FB"):
        nodes = [node for node in chain if node.ordered]
        for node, time_ns in zip(nodes, paces(nodes, 1)[1], strict=True):
            lanes[node.exchanges] += time_ns
    return lanes[False] / NS, lanes[True] / NS


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
