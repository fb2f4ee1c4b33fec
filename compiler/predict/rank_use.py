"""How the busiest pipeline rank uses its lanes in a step: compute by class of kernel, and exchanges by the ranks that
exchange, with the part of them that no compute hides."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import hypot
from typing import get_args

from compiler.ir import Cost, Cut, Stage, Use
from compiler.machine.rates import Rates
from compiler.machine.rates.table import LAUNCH, shape_at
from compiler.plan.actions.chains import Axis, ChainNode
from compiler.plan.actions.order import ActionLanes, lanes_of_chains, paces
from compiler.plan.split_blocks import balanced_rows
from compiler.predict.prediction import AxisTime, KernelTime, RankUse
from compiler.predict.tail import groups_of, reduce_seconds
from compiler.predict.timed_plan import TimedPlan
from compiler.predict.times import NS, StepRuns, key_of
from runtime.contract.actions import Pair, is_copy

Kernel = tuple[str, tuple[int, ...]]  # class and shape


def use_of(timed: TimedPlan) -> RankUse:
    """The use of the lanes of the rank that runs actions for the longest time."""
    schedule = timed.schedule
    rank = max(timed.step.ranks, key=lambda rank: rank.busy_s).pp_rank
    runs = StepRuns(timed.lowering, schedule, lambda chains, sends: _run(timed, chains, sends))
    steps = {key_of(step): step for step in schedule.actions[rank] if not is_copy(step)}
    counts = Counter(key_of(step) for step in schedule.actions[rank] if not is_copy(step))
    busy, exposed, slope = (defaultdict[Axis, float](float) for _ in range(3))
    kernels = defaultdict[Kernel, float](float)
    costs = _CostsOfKernels(timed, rank)
    whole_s = 0.0
    for key, step in steps.items():
        (lanes, calls), times = runs.of(step, rank), counts[key] * timed.slowdown / NS
        times *= timed.rates[rank].pair if isinstance(step, Pair) else 1.0
        for axis in lanes.busy:
            busy[axis] += lanes.busy[axis] * times
            exposed[axis] += lanes.exposed[axis] * times
            slope[axis] += lanes.slope[axis] * times
        whole_s += lanes.run.end * times
        for kernel, share in costs.shares(calls).items():
            kernels[kernel] += share * lanes.run.compute * times
    tail = timed.tails[rank]
    tail_s = tail.reduction_s + tail.gather_s
    exposed["data"] += tail_s
    slope["data"] += tail_s
    busy["data"] += max(tail.reduction_s, _reductions_s(timed, rank)) + tail.gather_s
    axes = (
        AxisTime(axis, _link_class(timed, rank, axis), busy[axis], exposed[axis], max(0.0, slope[axis]))
        for axis in get_args(Axis)
        if busy[axis]
    )
    return RankUse(rank, _classes(kernels, timed.rates[rank]), tuple(axes), whole_s + tail_s)


Call = tuple[str, str, int]  # of a segment: its site, its phase, and nanoseconds


def _run(
    timed: TimedPlan, chains: Sequence[Sequence[ChainNode]], sends: Sequence[int]
) -> tuple[ActionLanes, list[Call]]:
    """How an action or a pair uses its lanes, and the segments that it calls."""
    nodes = [node for chain in chains for node in chain if node.uses_lane]
    times, _ = paces(nodes, len(chains))
    calls = [
        (node.instruction.site, node.instruction.phase, time)
        for node, time in zip(nodes, times, strict=True)
        if not node.is_exchange
    ]
    return lanes_of_chains(chains, sends, timed.lowering.orders), calls


class _CostsOfKernels:
    """The kernels of the segments of a plan on a rank, each priced once."""

    def __init__(self, timed: TimedPlan, rank: int) -> None:
        self._rates, self._rows = timed.rates[rank], balanced_rows(timed.spec)
        self._cuts = timed.plan.cuts
        self._kinds: dict[str, str] = {use.site: use.segment.kind for use in timed.plan.uses}
        self._priced: dict[tuple[str, str], dict[Kernel, float]] = {}  # by site and phase

    def shares(self, calls: Sequence[Call]) -> dict[Kernel, float]:
        """The share of each kernel in the compute of an action, of which each segment has its own time."""
        shares, whole = defaultdict[Kernel, float](float), sum(time for _, _, time in calls)
        for site, phase, time in (call for call in calls if call[2]):
            kernels = self._kernels(site, phase)
            all_s = sum(kernels.values())
            for kernel, time_s in kernels.items():
                shares[kernel] += time_s / all_s * time / whole
        return shares

    def _kernels(self, site: str, phase: str) -> dict[Kernel, float]:
        if (site, phase) not in self._priced:
            cost = dict(self._cuts[site].costs)[phase]
            self._priced[site, phase] = kernel_seconds(self._kinds[site], [cost], self._rates, self._rows)
        return self._priced[site, phase]


def _link_class(timed: TimedPlan, rank: int, axis: Axis) -> str:
    """The class of links that prices the exchanges of an axis: those over the network, if any crosses it."""
    plan, rates = timed.plan, timed.rates[rank]
    fabric, mesh = rates.fabric, plan.mesh
    if axis == "experts":
        return f"dispatch_{_scope(rates.experts.spread.nodes)}"
    if axis == "pipeline":
        others = (mesh.rank(other, 0) for other in range(mesh.pp) if other != rank)
        return f"message_{_scope(max(fabric.spread((mesh.rank(rank, 0), other)).nodes for other in others))}"
    if axis == "data":
        nodes = max(fabric.spread(group.holders).nodes for group in groups_of(plan, rank) if len(group.holders) > 1)
    else:
        nodes = fabric.spread(rates.sharing["tp" if axis == "tensor" else "cp"]).nodes
    return f"all_reduce_{_scope(nodes)}"


def _scope(nodes: int) -> str:
    return "node" if nodes == 1 else "network"


def _reductions_s(timed: TimedPlan, rank: int) -> float:
    """Seconds of a rank's reductions of gradients, with those that overlap with the backward."""
    spec, plan = timed.spec, timed.plan
    groups = [groups_of(plan, holder) for holder in range(plan.mesh.pp)]
    seconds = reduce_seconds(spec, groups, timed.rates[0].fabric.reduce_s)
    return sum(time_s for (ranks, _), time_s in seconds.items() if rank in ranks) * timed.slowdown


def class_seconds(stage: Stage, cuts: Mapping[str, Cut], rates: Rates, rows: int) -> dict[str, float]:
    """By kernel class, the seconds that a micro-batch computes in a stage, forward and backward, at the given rates."""
    seconds = defaultdict[str, float](float)
    for use in (step for step in stage.steps if isinstance(step, Use)):
        costs = [cost for _, cost in cuts[use.site].costs]
        for (kind, _), time_s in kernel_seconds(use.segment.kind, costs, rates, rows).items():
            seconds[kind] += time_s
    return dict(seconds)


def kernel_seconds(segment: str, costs: Iterable[Cost], rates: Rates, rows: int) -> dict[Kernel, float]:
    """The seconds of the kernels of a kind of segment, by class and shape."""
    seconds = defaultdict[Kernel, float](float)
    for op, work in (pair for cost in costs for pair in cost.ops):
        for kind, time_s in rates.kernels_s(segment, op, work, rows):
            seconds[kind, shape_at(work.shape, rows)] += time_s
        seconds[LAUNCH, ()] += rates.launch_s
    return seconds


def _classes(kernels: Mapping[Kernel, float], rates: Rates) -> dict[str, KernelTime]:
    """Kernels by class, the longest first."""
    measured = {(kind, shape) for (kind, _), points in rates.points.items() for shape, _ in points if shape}
    times, guessed = defaultdict[str, float](float), defaultdict[str, float](float)
    for (kind, shape), seconds in kernels.items():
        times[kind] += seconds
        guessed[kind] = hypot(guessed[kind], 0.0 if (kind, shape) in measured else seconds)
    classes = {kind: KernelTime(seconds, guessed[kind] / seconds) for kind, seconds in times.items() if seconds}
    return dict(sorted(classes.items(), key=lambda entry: -entry[1].seconds))
