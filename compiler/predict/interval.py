"""How far a step may be from its prediction, from the errors of its rates, class by class.

The error of a class is the distance of each of its rows from the rate that the other rows imply for its shape (rms of
logarithms). It is at least `LEAST`, and `UNKNOWN` if there are fewer than two rows. Rates that were measured alone
belong to a kernel that has the device to itself. Therefore the upper end also applies the factors of the one public
profile of training (the table `PROFILED`) to classes for which the table has no factor. A factor that was carried over
from another device may be absent here or twice as large, so both ends include it. Errors of classes are independent
and are added as squares, weighted by the class's share of the busiest rank. Factors come from one profile and are added
as they are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import exp, log, sqrt

from compiler.ir import Cut, Plan, Stage, Use
from compiler.machine.rates import Rates, shipped_table, shipped_table_names
from compiler.machine.rates.table import Point, rate_at
from compiler.predict.prediction import Interval
from compiler.schedule.schedule import Schedule
from runtime.contract.actions import actions_of

LEAST, UNKNOWN = 0.05, 0.20
MOST_COMPARED = 400  # rows of a class that are compared with all others; of more rows, every k-th is taken
PROFILED = "h800-calibrated"


def class_seconds(stage: Stage, cuts: Mapping[str, Cut], rates: Rates, rows: int) -> dict[str, float]:
    """By kernel class, the seconds that a micro-batch computes in a stage, forward and backward."""
    seconds: dict[str, float] = defaultdict(float)
    for use in (step for step in stage.steps if isinstance(step, Use)):
        for _, cost in cuts[use.site].costs:
            for op, work in cost.ops:
                for kind, time_s in rates.kernels_s(use.segment.kind, op, work, rows):
                    seconds[kind] += time_s
                seconds["launch"] += rates.launch_s
    return dict(seconds)


def rank_seconds(plan: Plan, rates: Rates, rows: int, schedule: Schedule, rank: int) -> dict[str, float]:
    """By kernel class, the seconds that a pipeline rank computes in a step."""
    actions = [action for step in schedule.actions[rank] for action in actions_of(step)]
    counts = Counter(action.stage for action in actions if action.kind == "F")
    total: dict[str, float] = defaultdict(float)
    for stage, count in sorted(counts.items()):
        for kind, seconds in class_seconds(plan.stages[stage], plan.cuts, rates, rows).items():
            total[kind] += count * seconds
    return dict(total)


def interval_of(step_s: float, seconds: Mapping[str, float], exposed_s: float, rates: Rates) -> Interval:
    """The interval of a step whose busiest rank computes `seconds` by class, and waits `exposed_s` for exchanges."""
    busy = sum(seconds.values()) + exposed_s
    exchange = "dispatch_network" if rates.experts.spread.nodes > 1 else "dispatch_node"
    tensor = rates.sharing["tp"]
    if len(tensor) > 1:
        exchange = "all_reduce_network" if rates.fabric.spread(tensor).nodes > 1 else "all_reduce_node"
    parts = {**seconds, exchange: exposed_s}
    factors = factors_of(rates)
    low = high = bias = without = twice = 0.0
    for kind, part in parts.items():
        share = part / busy if busy else 0.0
        error = error_of(rates, kind)
        low += (share * (1 - 1 / (1 + error))) ** 2
        high += (share * error) ** 2
        bias += share * (factors.get(kind, 1.0) - 1)
        without += share * (1 - 1 / rates.carried.get(kind, 1.0))
        twice += share * (rates.carried.get(kind, 1.0) - 1)
    faster, slower = sqrt(low) + without - min(0.0, bias), sqrt(high) + twice + max(0.0, bias)
    return Interval(step_s * (1 - faster), step_s * (1 + slower))


def error_of(rates: Rates, kind: str) -> float:
    """The error of the rate of a class, as a share of its time."""
    if kind == "launch":
        return UNKNOWN
    spreads = [spread_of(points) for (name, _), points in rates.points.items() if name == kind]
    return max([LEAST, *spreads]) if spreads else UNKNOWN


def spread_of(points: Sequence[Point]) -> float:
    """How far the rate of each row is from the one that the other rows imply; `UNKNOWN` if there are no others."""
    if len(points) < 2 or not all(shape for shape, _ in points):
        return UNKNOWN
    points = points[:: -(-len(points) // MOST_COMPARED)]
    deviations = [log(rate_at([*points[:k], *points[k + 1 :]], shape) / rate) for k, (shape, rate) in enumerate(points)]
    return exp(sqrt(sum(deviation**2 for deviation in deviations) / len(deviations))) - 1


def factors_of(rates: Rates) -> dict[str, float]:
    """How much longer classes took in a profile of training, for classes without a factor in the table."""
    if rates.table not in shipped_table_names() or PROFILED not in shipped_table_names() or rates.cores is not None:
        return {}
    listed = {factor.kind for factor in shipped_table(rates.table).factors}
    return {factor.kind: factor.factor for factor in shipped_table(PROFILED).factors if factor.kind not in listed}
