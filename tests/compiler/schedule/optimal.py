"""The least makespan of small schedules on any placement, by constraint programming; bounds are compared with it.

It is written from the rules of schedules, and shares no code with compiler/schedule/solver. Needs OR-tools.
"""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction
from itertools import combinations

from ortools.sat.python import cp_model

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import depends
from runtime.contract.actions import Action, Pair


def optimum(
    placement: StagePlacement,
    num_ranks: int,
    num_micro_batches: int,
    costs: Costs,
    cap: int | None,
    work: float = 5,
    in_order: bool = True,
) -> Fraction | None:
    """The least makespan under the cap; None if `work` (deterministic seconds) is too little to prove it.

    `in_order`: every stage runs the micro-batches of a direction in order. Micro-batches are alike, so this does not
    lengthen the makespan. Without it, only the forwards of the first stage run in order.
    """
    P, N = num_ranks, num_micro_batches
    model, last = cp_model.CpModel(), placement.num_stages(P) - 1
    cells = [(stage, m) for stage in range(last + 1) for m in range(N)]
    rank = {cell: placement.rank_of(P, N, *cell) for cell in cells}
    actions = {(kind, *cell): Action(kind, *cell) for cell in cells for kind in "FBIW"}
    lone = {key: costs.step_time(action, rank[key[1:]]) for key, action in actions.items()}
    pairs = {}
    for a, b in combinations(actions, 2):
        first, second = actions[a], actions[b]
        if rank[a[1:]] == rank[b[1:]] and not depends(first, second) and not depends(second, first):
            time = costs.step_time(Pair(first, second), rank[a[1:]])
            if time < lone[a] + lone[b]:
                pairs[a, b] = time
    denominators = [time.denominator for time in (*lone.values(), *pairs.values(), costs.latency)]
    unit = Fraction(1, math.lcm(*denominators))
    horizon = int(sum(lone.values()) / unit) + int(2 * len(cells) * costs.latency / unit)

    start = {key: model.new_int_var(0, horizon, f"start {key}") for key in actions}
    end = {key: model.new_int_var(0, horizon, f"end {key}") for key in actions}
    split = {cell: model.new_bool_var(f"split {cell}") for cell in cells}
    steps: dict[int, list[cp_model.IntervalVar]] = defaultdict(list)
    runs = defaultdict(list)
    for keys, time in [*(((key,), time) for key, time in lone.items()), *pairs.items()]:
        run, ticks = model.new_bool_var(f"run {keys}"), int(time / unit)
        for key in keys:
            runs[key].append(run)
            model.add(start[key] == start[keys[0]]).only_enforce_if(run)
            model.add(end[key] == start[key] + ticks).only_enforce_if(run)
        steps[rank[keys[0][1:]]].append(
            model.new_optional_interval_var(start[keys[0]], ticks, end[keys[0]], run, f"step {keys}")
        )
    for intervals in steps.values():
        model.add_no_overlap(intervals)
    latency = int(costs.latency / unit)
    makespan = model.new_int_var(0, horizon, "makespan")
    lives_by_rank: dict[int, list[cp_model.IntervalVar]] = defaultdict(list)
    for cell in cells:
        F, B, I, W = ((kind, *cell) for kind in "FBIW")
        model.add_exactly_one(runs[F])
        model.add_exactly_one([*runs[B], split[cell]])
        for key in (I, W):
            model.add_exactly_one([*runs[key], split[cell].negated()])
        model.add(end[B] == end[I])  # both are at the same time, although only one of them runs
        model.add(start[B] == start[I])
        model.add(start[B] >= end[F])
        model.add(start[W] >= end[B])
        model.add(end[W] == end[B]).only_enforce_if(split[cell].negated())
        model.add(makespan >= end[W])
        stage, m = cell
        if stage < last:
            hop = latency * (rank[cell] != rank[stage + 1, m])
            model.add(start["F", stage + 1, m] >= end[F] + hop)
            model.add(start[B] >= end["B", stage + 1, m] + hop)
        size = model.new_int_var(0, horizon, f"life {cell}")
        lives_by_rank[rank[cell]].append(model.new_interval_var(start[F], size, end[W], f"held {cell}"))
        if m and placement.direction(N, m) == placement.direction(N, m - 1) and (in_order or stage == 0):
            model.add(start[F] >= start["F", stage, m - 1])
            if in_order:
                model.add(start[B] >= start["B", stage, m - 1])
    if cap is not None:
        for lives in lives_by_rank.values():
            model.add_cumulative(lives, [1] * len(lives), cap)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    return solver.value(makespan) * unit if solver.solve(model) == cp_model.OPTIMAL else None
