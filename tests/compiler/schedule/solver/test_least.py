"""The search compared with all orders, on sizes that have few, and with slots timed by the independent judge."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import pytest

from compiler.schedule.costs import Costs, parse_costs
from compiler.schedule.dualpipe import both_ways
from compiler.schedule.schedule import ScheduleError
from compiler.schedule.simulate import peak_activations, simulate
from compiler.schedule.slots import B0, B1, F0, F1, I0, I1, Slot, W
from compiler.schedule.solver import Solver

TABLES = {
    "no gain": "F=1,I=1,W=1",
    "F&B": "F=1,I=1,W=1,FB=1.8",
    "F&B of uneven kinds": "F=2,I=3,W=1,FB=4.5",
    "all in pairs": "F=2,I=2,W=1,FB=3,FF=2.5,BB=4,II=3,FI=2.5,BI=4,IW=2.2",
}


def orders(
    left: dict[tuple[str, int], int], split: int = 0, open_: tuple[int, int] = (0, 0)
) -> Iterator[tuple[Slot, ...]]:
    """All orders of a rank. `left`: remaining F and B; a B may be split. `open_`: forwards without backward."""
    if not any(left.values()) and not split:
        yield ()
        return
    tokens = [token for token in (F0, F1) if left[token]]
    tokens += [token for token in (B0, B1, I0, I1) if left["B", token[1]] and open_[token[1]]]
    tokens += [W] * bool(split)
    lone = [(token,) for token in tokens]
    pairs = [
        (a, b) for index, a in enumerate(tokens) for b in tokens[index + 1 :] if {a[0], b[0]} <= set("FBI") or b == W
    ]
    for slot in (*lone, *pairs):
        remaining, near, far = dict(left), *open_
        for kind, chunk in slot:
            if kind != "W":
                remaining["F" if kind == "F" else "B", chunk] -= 1
            step = {"F": 1, "W": 0}.get(kind, -1)
            near, far = near + step * (chunk == 0), far + step * (chunk == 1)
        if min(near, far, *remaining.values()) >= 0:
            open_splits = split + sum(kind == "I" for kind, _ in slot) - (W in slot)
            for order in orders(remaining, open_splits, (near, far)):
                yield (slot, *order)


def least(num_ranks: int, num_micro_batches: int, table: Costs, cap: int) -> Fraction:
    """The least makespan of the bidirectional orders in which mirrored ranks run the same."""
    gains = table.gains()
    count = num_micro_batches // 2
    rows = [
        order
        for order in orders(dict.fromkeys((F0, F1, B0, B1), count))
        if all(len(slot) == 1 or "".join(sorted(slot[0][0] + slot[1][0])) in gains for slot in order)
    ]
    best = None
    for lists in product(rows, repeat=num_ranks // 2):
        schedule = both_ways("all", num_ranks, num_micro_batches, lambda rank, lists=lists: lists[rank])
        if max(peak_activations(schedule)) > cap:
            continue
        try:
            makespan = simulate(schedule, table).makespan
        except ScheduleError:  # they wait for each other for ever
            continue
        best = makespan if best is None else min(best, makespan)
    assert best is not None
    return best


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("cap", [2, 3])
def test_nothing_is_shorter_on_four_ranks(name: str, cap: int) -> None:
    table = parse_costs(TABLES[name])
    solution = Solver(table, cap).solve(4, 2)
    assert solution.lower_bound <= solution.makespan <= least(4, 2, table, cap)


def test_nothing_is_shorter_with_four_micro_batches() -> None:
    table = parse_costs(TABLES["F&B"])
    assert Solver(table, 3).solve(2, 4).makespan <= least(2, 4, table, 3)
