"""Compare a searched order of micro-batches of unequal costs with random orders.

    python -m benchmarks.orders

Lognormal costs, P=8, N=24, F=I=W=1 for 1/P of the model; means of three draws, each compared with 20 random orders. The
results are the same on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import product

from compiler.cli.commands.schedule_answer import number_text, percent
from compiler.schedule import SCHEDULES
from compiler.schedule.costs import Costs
from compiler.schedule.order import best_order, reorder_costs
from compiler.schedule.simulate import simulate

RANKS, MICRO_BATCHES = 8, 24
NAMES, SIGMAS = ("1f1b", "dualpipe", "zbv"), (0.3, 0.6)
COLUMNS = ("schedule", "σ", "random order", "order found", "less")


def table() -> Iterator[str]:
    """The lines of the table."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|:---|{'---:|' * (len(COLUMNS) - 1)}"
    for name, sigma in product(NAMES, SIGMAS):
        draws = [_draw(name, sigma, seed) for seed in range(3)]
        mean, best = (sum(values, Fraction(0)) / len(draws) for values in zip(*draws, strict=True))
        cells = (name, str(sigma), number_text(mean), number_text(best), percent(1 - best / mean))
        yield f"| {' | '.join(cells)} |"


def _draw(name: str, sigma: float, seed: int) -> tuple[Fraction, Fraction]:
    """(mean makespan of random orders, makespan of the order found)."""
    rng = random.Random(seed)
    weights = [Fraction(round(1000 * math.exp(rng.gauss(0, sigma))), 1000) for _ in range(MICRO_BATCHES)]
    schedule = SCHEDULES[name].generate(RANKS, MICRO_BATCHES)
    costs = Costs(micro_batches=tuple(weights)).recut(RANKS, schedule.num_stages)
    orders = [rng.sample(range(MICRO_BATCHES), MICRO_BATCHES) for _ in range(20)]
    spans = [
        simulate(schedule, reorder_costs(costs, order)).makespan for order in (*orders, best_order(schedule, costs))
    ]
    return sum(spans[:-1], Fraction(0)) / 20, spans[-1]


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
