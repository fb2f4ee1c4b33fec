"""What each action and pair of a schedule takes: its own stages' instructions in the order of the two lanes.

Nothing is averaged over stages: a slow stage is slow, and a pair gains what its two stages let it gain.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from compiler.ir import Cut, Plan, Stage, Use
from compiler.lower.chains import Chains, Node
from compiler.lower.lanes import Best, Jobs, best_order, end_of, least_end
from compiler.lower.order import jobs_of
from compiler.rates import Rates
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
    messages: Mapping[tuple[int, int], int]  # of one to a neighbour, by the pipeline ranks that send and receive it

    def check(self, num_ranks: int, num_stages: int) -> None:
        """Nothing to hold against sizes: they are those of the schedule it was made for."""

    def of(self, step: Step, rank: int) -> Fraction:
        """Time of a step of the schedule."""
        return Fraction(self.times[key_of(step), rank], NS_IN_MS)

    def message(self, source: int, target: int) -> Fraction:
        """Time of a message from a pipeline rank to another."""
        return Fraction(self.messages[source, target], NS_IN_MS)

    def computed_s(self, steps: Iterable[Step], rank: int) -> float:
        """What a rank computes in some steps."""
        return sum(self.compute[key_of(step), rank] for step in steps) / NS

    def longer(self, factor: float) -> StepTimes:
        """All of it by a factor of at least 1."""
        times, compute = ({key: round(time * factor) for key, time in t.items()} for t in (self.times, self.compute))
        return StepTimes(times, compute, self.messages)


def key_of(step: Step) -> Key:
    """What the time of a step depends on, beside its rank."""
    return tuple((action.kind, action.stage) for action in actions_of(step))


def step_times(
    plan: Plan,
    cuts: Mapping[str, Cut],
    rates: Sequence[Rates],
    schedule: Schedule,
    least: bool = False,
    best: Best = best_order,
) -> StepTimes:
    """Times of all steps of a schedule on a plan's stages; `rates` are those of each pipeline rank's devices.

    `least`: what each step takes in any order of its instructions at least, which is found much sooner.
    `best`: who knows or finds orders.
    """
    twins = twins_of(plan.stages)
    kinds = [rates.index(each) for each in rates]  # of devices; the first rank that has one stands for it
    nodes: dict[tuple[str, int, int], list[Node]] = {}
    ends: dict[tuple[Key, int], tuple[int, int]] = {}
    times: dict[tuple[Key, int], tuple[int, int]] = {}
    for rank, steps in enumerate(schedule.actions):
        for key in sorted({key_of(step) for step in steps}):
            alike = _alike(key, twins)
            for kind, stage in alike:
                if (kind, stage, kinds[rank]) not in nodes:
                    made = Chains(plan.stages[stage], cuts, rates[rank], -1, -1)
                    nodes[kind, stage, kinds[rank]] = made.of(kind)
            if (alike, kinds[rank]) not in ends:
                chains = [nodes[kind, stage, kinds[rank]] for kind, stage in alike]
                if not any(node.exchanges for chain in chains for node in chain):
                    free = rates[rank].undivided
                    chains = [Chains(plan.stages[stage], cuts, free, -1, -1).of(kind) for kind, stage in alike]
                jobs = jobs_of(chains)
                ends[alike, kinds[rank]] = _span(jobs, rates[rank].pair if len(alike) > 1 else 1.0, least, best)
            times[key, rank] = ends[alike, kinds[rank]]
    between = messages_s(rates[0].fabric, plan, schedule.stage_placement)
    whole, compute = ({key: both[k] for key, both in times.items()} for k in (0, 1))
    return StepTimes(whole, compute, {ends: round(time_s * NS) for ends, time_s in between.items()})


def _span(jobs: Jobs, factor: float, least: bool, best: Best) -> tuple[int, int]:
    """Nanoseconds until the last job has ended, and those that the compute lane is busy."""
    end = least_end(jobs) if least else end_of(jobs, best(jobs))
    return round(end * factor), jobs.total(exchange=False)


def twins_of(stages: Iterable[Stage]) -> dict[int, tuple[int, ...]]:
    """Stage → the stages that run the very same segments and exchanges, ascending."""
    alike: dict[Hashable, list[int]] = {}
    for stage in stages:
        alike.setdefault(_shape(stage), []).append(stage.index)
    return {stage: tuple(group) for group in alike.values() for stage in group}


def lane_seconds(plan: Plan, cuts: Mapping[str, Cut], rates: Rates, stage: int) -> tuple[float, float]:
    """Seconds that a micro-batch holds the compute lane and the communication lane, there and back."""
    chains = Chains(plan.stages[stage], cuts, rates, -1, -1)
    held = [node for kind in "FB" for node in chains.of(kind)]
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
        step.segment.key if isinstance(step, Use) else (step.kind, tuple((b.shape, b.dtype) for b in step.sizes))
        for step in stage.steps
    )
