"""Predicted times of actions and pairs, from their two-lane orders: the costs of schedules and of bodies.

A schedule needs costs before there is a program, so its costs come from the stages. The costs of a body come from its
instructions. Both use the same times of the same orders.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import combinations_with_replacement
from statistics import mean

from compiler.ir import Body, Instruction, Plan, Program
from compiler.ir.expert_placement import ReceivedRows
from compiler.machine.topology.traffic import RankOf, messages_of
from compiler.plan.actions.chains import EXCHANGES, ChainNode, Chains, Key
from compiler.plan.actions.lanes import Lanes
from compiler.plan.actions.order import paces, run_of_chains
from compiler.program.lower.lowering import Lowering
from compiler.program.lower.twins import Key as StageKey
from compiler.program.lower.twins import key_of_twins, twins_of
from compiler.schedule.costs import PAIR_KINDS, Costs
from compiler.schedule.weights import Side, StagePairs, StageWeight, Weight, as_weight, round_weights
from runtime.contract.actions import COPIES, Action, Pair
from runtime.contract.actions import KINDS as ACTION_KINDS
from runtime.contract.names import ProgramName

Times = Mapping[Key, ChainNode]  # by key: a segment or exchange, with the nanoseconds for which it occupies its lane
KINDS = "FBIW"
_PARTS = 1000  # searches round weights and shares to 1 / _PARTS


# ---------------------------------------------------------------- costs of a schedule


def stage_costs(lowering: Lowering, pairs: Collection[str] = PAIR_KINDS) -> Costs:
    """Costs of a schedule of the plan's stages, in milliseconds, with the gains of the given `pairs` of kinds.

    A lone action takes the time of its own order and of its message. A stage's weight for a kind of action is that
    time over the mean of all stages. The gain of a pair is measured on the most common kind of rank. A stage that two
    kinds of devices run takes the time of the slower one.
    """
    plan = lowering.plan
    action_times = _ActionTimes(lowering)
    lone_times = []
    for stage in range(len(plan.stages)):
        kinds = dict.fromkeys(lowering.kinds[rank] for rank in plan.ranks_of_stage(stage))
        times = [{kind: action_times.of(rank, (kind, stage)) for kind in KINDS} for rank in kinds]
        lone_times.append(max(times, key=lambda by_kind: sum(by_kind.values())))
    rank = _common_rank(plan, lone_times)
    stages = plan.stages_of(rank)
    gained = {}
    stage_pairs = tuple(dict.fromkeys([(stages[0], stages[-1]), (stages[-1], stages[0])]))
    for first, second in map(tuple, sorted(pairs)):
        joint_time = sum(action_times.of(rank, (first, a), (second, b)) for a, b in stage_pairs)
        separate_time = sum(action_times.of(rank, side) for a, b in stage_pairs for side in ((first, a), (second, b)))
        if joint_time < separate_time:
            lone = mean(times[first] + times[second] for times in lone_times)
            gained[first + second] = _ms(Fraction(lone) * joint_time / separate_time)
    F, B, I, W = mean_times = [_ms(mean(Fraction(times[kind]) for times in lone_times)) for kind in KINDS]
    weights = [
        [_ms(times[kind]) / (mean_ms or 1) for kind, mean_ms in zip(KINDS, mean_times, strict=True)]
        for times in lone_times
    ]
    return Costs(
        F=F,
        B=B,
        I=I,
        W=W,
        pairs=tuple(sorted(gained.items())),
        stages=tuple(map(Weight.of_factors, weights)),
    )


def costs_of_searches(lowering: Lowering) -> Costs:
    """Costs for the search of schedules and orders. Weights of stages and times of pairs are rounded to a thousandth.

    The predictions are less precise than that, and rounding makes stages equal that differ by less. Each pair has its
    own time on each rank.
    """
    costs, plan = stage_costs(lowering), lowering.plan
    stages = round_weights(costs.stages, _PARTS)
    shares = _shares_of_pairs(lowering, costs)
    labels = _labels(plan, stages, shares)
    pairs = _shares_by_label(shares, labels)
    if pairs is None:  # stages that are alike have unlike pairs
        labels = [*range(1, len(stages) + 1)]
        pairs = _shares_by_label(shares, labels)
    assert pairs is not None
    of_label = tuple(as_weight(weight)._replace(label=label) for weight, label in zip(stages, labels, strict=True))
    return replace(costs, stages=of_label, stage_pairs=StagePairs(pairs))


def _shares_of_pairs(lowering: Lowering, costs: Costs) -> dict[tuple[Side, Side], Fraction]:
    """The time of each pair as a share of its two actions run apart; the slower rank's share if two ranks run it."""
    plan = lowering.plan
    action_times = _ActionTimes(lowering)
    shares: dict[tuple[Side, Side], Fraction] = {}
    for rank in range(plan.mesh.pp):
        # In the order in which a search writes them: which action is first may decide which order of jobs it finds.
        sides = [(kind, stage) for kind in KINDS for stage in sorted(plan.stages_of(rank))]
        lone = {
            (kind, stage): costs.lone_time(kind) * as_weight(costs.stages[stage]).factor(kind) for kind, stage in sides
        }
        for pair in combinations_with_replacement(sides, 2):
            separate_time = sum(lone[side] for side in pair)
            share = _ms(action_times.of(rank, *pair)) / separate_time if separate_time else Fraction(1)
            shares[pair] = max(shares.get(pair, Fraction(0)), Fraction(round(_PARTS * share), _PARTS))
    return shares


def least_ratio(lowering: Lowering, costs: Costs, factor: float) -> Fraction:
    """The least ratio of the time of a step on its rank, longer by a factor, to its time at the costs of a search.

    Searches round costs, and take the time of the slower of two ranks. A lower bound at their costs times this ratio is
    one of the predicted time. A pair is compared with its two actions in turn if these take less at the costs.
    """
    action_times, ratios = _ActionTimes(lowering), []
    for rank in range(lowering.plan.mesh.pp):
        sides = [(kind, stage) for kind in ACTION_KINDS for stage in sorted(lowering.plan.stages_of(rank))]
        lone = {side: costs.step_time(Action(*side, 0), rank) for side in sides}
        steps: list[tuple[tuple[Side, ...], Fraction]] = [((side,), lone[side]) for side in sides]
        for first, second in combinations_with_replacement(sides, 2):
            pair = costs.step_time(Pair(Action(*first, 0), Action(*second, 1)), rank)
            steps.append(((first, second), min(pair, lone[first] + lone[second])))
        ratios += [
            _ms(round(action_times.of(rank, *actions, sender=rank) * factor)) / time for actions, time in steps if time
        ]
    return min(ratios, default=Fraction(1))


def _labels(plan: Plan, stages: Sequence[StageWeight], shares: Mapping[tuple[Side, Side], Fraction]) -> list[int]:
    """A label for each stage. Stages with equal weights and pairs share a label, unless they are on one rank."""
    between: dict[tuple[int, int], list[tuple[str, str, Fraction]]] = defaultdict(list)
    for (kind, stage), (other_kind, other_stage) in sorted(shares):
        share = shares[(kind, stage), (other_kind, other_stage)]
        between[stage, other_stage].append((kind, other_kind, share))
        if stage != other_stage:
            between[other_stage, stage].append((other_kind, kind, share))
    keys: list[object] = []
    for stage, weight in enumerate(stages):
        stages_of_rank = sorted(plan.stages_of(plan.ranks_of_stage(stage)[0]))
        with_others = [
            (stages_of_rank.index(other_stage), stages[other_stage], tuple(between[stage, other_stage]))
            for other_stage in stages_of_rank
        ]
        keys.append((stages_of_rank.index(stage), weight, tuple(with_others)))
    alike = list(dict.fromkeys(keys))
    return [alike.index(key) + 1 for key in keys]


def _shares_by_label(
    shares: Mapping[tuple[Side, Side], Fraction], labels: Sequence[int]
) -> tuple[tuple[Side, Side, Fraction], ...] | None:
    """The shares by label; None if pairs with the same labels have different shares."""
    by_labels: dict[tuple[Side, Side], Fraction] = {}
    for ((kind, stage), (other_kind, other_stage)), share in shares.items():
        first, second = sorted(((kind, labels[stage]), (other_kind, labels[other_stage])))
        if by_labels.setdefault((first, second), share) != share:
            return None
    return tuple((*pair, share) for pair, share in sorted(by_labels.items()))


def copy_time(lowering: Lowering) -> Fraction:
    """Milliseconds to copy a stage's activation to the host, or back, for the stage whose copy takes longest."""
    plan = lowering.plan
    ranks = [(stage, rank) for stage in range(len(plan.stages)) for rank in plan.ranks_of_stage(stage)]
    return _ms(max(copy_ns(lowering.chains(stage, rank)) for stage, rank in ranks))


class _ActionTimes:
    """The times of actions and pairs of a plan, each found once for all stages that are alike."""

    def __init__(self, lowering: Lowering) -> None:
        plan = lowering.plan
        self._lowering, self._twins = lowering, twins_of(plan.stages)
        self._messages = messages_of(lowering.rates[0].fabric, plan, plan.stage_placement)
        place = plan.stage_placement
        self._directions = [partial(place.rank_of, plan.mesh.pp, 2, micro_batch=direction) for direction in (0, 1)]
        self._times: dict[tuple[StageKey, int, tuple[int, ...]], int] = {}

    def of(self, rank: int, *actions: tuple[str, int], sender: int | None = None) -> int:
        """Nanoseconds of an action or a pair, each action a (kind, stage), on the device of a rank.

        `sender`: the rank that sends the messages; None for that of the first micro-batch.
        """
        lowering, num_stages = self._lowering, len(self._lowering.plan.stages)
        ranks = [self._ranks_of(stage, sender) for _, stage in actions]
        sends = tuple(
            self._messages.sent_ns(kind, stage, num_stages, rank_of)
            for (kind, stage), rank_of in zip(actions, ranks, strict=True)
        )
        key = key_of_twins(actions, self._twins), lowering.kinds[rank], sends
        if key not in self._times:
            chains = [lowering.chains(stage, rank).chain(kind) for kind, stage in key[0]]
            end = run_of_chains(chains, sends, lowering.orders).end
            self._times[key] = round(end * lowering.rates[rank].pair) if len(actions) > 1 else end
        return self._times[key]

    def _ranks_of(self, stage: int, sender: int | None) -> RankOf:
        """The ranks of all stages, for micro-batches of which `sender` runs a stage."""
        there, back = self._directions
        return there if sender is None or there(stage) == sender else back


def copy_ns(chains: Chains) -> int:
    """Nanoseconds to copy the tensors that a forward saves to the host, or back."""
    return round(10**9 * chains.rates.host_time_s(chains.offloaded_bytes(ReceivedRows(chains.rows))))


def _common_rank(plan: Plan, alone: Sequence[Mapping[str, int]]) -> int:
    """The first rank whose stages take the most common times."""
    ranks = [plan.stages_of(rank) for rank in range(plan.mesh.pp)]
    kinds = [tuple(sorted(tuple(alone[stage].items()) for stage in stages)) for stages in ranks]
    return kinds.index(Counter(kinds).most_common(1)[0][0])


def _ms(time_ns: Fraction | int) -> Fraction:
    return Fraction(round(time_ns), 10**6)


# ---------------------------------------------------------------- times of a program


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """Nanoseconds until a body's last instruction ends, and for which each lane is busy until then."""

    end: int = 0
    compute: int = 0
    communication: int = 0

    @property
    def hidden(self) -> float:
        """Share of the communication time that overlaps with compute; 1 if there is no communication."""
        # Compute pauses only to wait for an exchange, so the exposed communication is the time of its pauses.
        return 1 - (self.end - self.compute) / self.communication if self.communication else 1.0


@dataclass(frozen=True)
class Overlap:
    """Predicted times of a program: of each body, and the totals of all invocations by kind, such as F, F&B and W."""

    bodies: tuple[tuple[str, LaneTimes], ...]
    kinds: tuple[tuple[str, LaneTimes], ...]

    @property
    def total(self) -> LaneTimes:
        """The times of all ranks together."""
        return _sum((1, times) for _, times in self.kinds)


def rank_times(lowering: Lowering) -> tuple[Times, ...]:
    """The times of each pipeline rank; ranks on the same kind of device share one table."""
    tables = {kind: times_on(lowering, kind) for kind in dict.fromkeys(lowering.kinds)}
    return tuple(tables[kind] for kind in lowering.kinds)


def times_on(lowering: Lowering, rank: int) -> Times:
    """The time of every segment and exchange of a plan on the device of a pipeline rank."""
    chains = [lowering.chains(stage, rank) for stage in range(len(lowering.plan.stages))]
    nodes = [node for stage in chains for node in (*stage.chain("F"), *stage.chain("B")) if node.uses_lane]
    return {node.key: node for node in nodes}


def lane_times(instructions: Sequence[Instruction], times: Times) -> LaneTimes:
    """The time that a body takes, and for which each of its lanes is busy."""
    spans = list(timed_spans(instructions, times))
    busy = [sum(end - start for i, start, end in spans if (i.kind in EXCHANGES) == lane) for lane in (False, True)]
    return LaneTimes(max((end for _, _, end in spans), default=0), *busy)


def timed_spans(
    instructions: Sequence[Instruction], times: Times, sends_ns: Sequence[int] = ()
) -> Iterator[tuple[Instruction, int, int]]:
    """The segments and exchanges of a body, each with its start and end in nanoseconds.

    Segments run in order on the compute lane, exchanges in order on the other; compute stops at each wait. `sends_ns`
    is the time that each slot's message spends on the link to another rank. If it is given, messages are included, as
    exchanges that nothing waits for.
    """
    on_lanes = [i for i in instructions if i.kind == "run" or i.kind in EXCHANGES]
    nodes = [times[i.kind, i.phase, i.site] for i in on_lanes]
    pace = zip(*paces(nodes, len({i.slot for i in on_lanes})), strict=True)
    lanes = Lanes()
    ends: dict[tuple[int, str, str, str], int] = {}
    for i in instructions:
        key = (i.slot, i.wait or i.kind, i.phase, i.site)
        if i.kind == "wait":
            lanes.wait(ends[key])
        elif i.kind in EXCHANGES:
            time, _ = next(pace)
            ends[key] = lanes.exchange(time)
            yield i, lanes.link - time, lanes.link
        elif i.kind == "send" and sends_ns and sends_ns[i.slot]:
            lanes.exchange(sends_ns[i.slot])
            yield i, lanes.link - sends_ns[i.slot], lanes.link
        elif i.kind == "run":
            start = lanes.compute
            yield i, start, lanes.run(*next(pace))


def overlaps_of(programs: Mapping[ProgramName, Program], times: Times | Sequence[Times]) -> dict[ProgramName, Overlap]:
    """How the programs of one plan use the two lanes, with each body counted as often as it is invoked.

    `times`: one table for all pipeline ranks, or one for each. A body that two kinds of devices run has the times of
    the slower one.
    """
    lanes: dict[tuple[str, int], LaneTimes] = {}  # on one kind of device a name stands for one body
    for program in programs.values():
        for bodies, (kind, table) in zip(program.bodies, tables_of(times, len(program.bodies)), strict=True):
            for body in bodies:
                if (body.name, kind) not in lanes:
                    lanes[body.name, kind] = lane_times(body.instructions, table)
    return {name: _overlap(program, times, lanes) for name, program in programs.items()}


def _overlap(program: Program, times: Times | Sequence[Times], lanes: Mapping[tuple[str, int], LaneTimes]) -> Overlap:
    """The overlap of one program. `lanes`: the times of its bodies, by name and kind of device."""
    kinds: dict[str, list[tuple[int, LaneTimes]]] = defaultdict(list)
    slowest: dict[str, LaneTimes] = {}
    tables = tables_of(times, len(program.bodies))
    for bodies, invocations, (kind, _) in zip(program.bodies, program.invocations, tables, strict=True):
        counts = Counter(invocation.body for invocation in invocations)
        for body in bodies:
            if body.actions[0].kind in COPIES:
                continue  # copies use neither lane
            times_of_body = lanes[body.name, kind]
            kinds[_kinds(body)].append((counts[body.name], times_of_body))
            slowest[body.name] = max(
                slowest.get(body.name, times_of_body), times_of_body, key=lambda lane_times: lane_times.end
            )
    return Overlap(
        tuple(sorted(slowest.items())),
        tuple((kind, _sum(kinds[kind])) for kind in sorted(kinds, key=lambda kind: (len(kind), kind))),
    )


def tables_of(times: Times | Sequence[Times], num_ranks: int) -> list[tuple[int, Times]]:
    """For each pipeline rank, its table of times, after the first rank with an equal table."""
    tables = [times] * num_ranks if isinstance(times, Mapping) else list(times)
    return [(tables.index(table), table) for table in tables]


def _kinds(body: Body) -> str:
    """The kinds of a body's actions: F, B, I, W, or two of them as in F&B, with the forward of a pair first."""
    return "&".join(sorted((action[0] for action in body.actions), key=KINDS.index))


def _sum(counted: Iterable[tuple[int, LaneTimes]]) -> LaneTimes:
    rows = [(n * t.end, n * t.compute, n * t.communication) for n, t in counted]
    return LaneTimes(*(sum(column) for column in zip(*rows, strict=True)))
