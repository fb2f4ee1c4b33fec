"""The time that ordering micro-batches of unequal costs saves over random orders, compared with the best known orders.

    python -m benchmarks.orders

Lognormal costs, P=8, N=24, F=I=W=1 for 1/P of the model; means of three draws, each compared with 20 random orders. The
results are the same on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction

from compiler.cli.commands.schedule_answer import percent, shown
from compiler.schedule import SCHEDULES
from compiler.schedule.costs import Costs
from compiler.schedule.order import best_order, ordered
from compiler.schedule.simulate import simulate

RANKS, MICRO_BATCHES = 8, 24
KNOWN = {  # (schedule, sigma): percent that the best known order saves over a random one
    ("1f1b", 0.3): 20,
    ("1f1b", 0.6): 29,
    ("dualpipe", 0.3): 17,
    ("dualpipe", 0.6): 24,
    ("zbv", 0.3): 6,
    ("zbv", 0.6): 14,
}
COLUMNS = ("schedule", "σ", "random order", "order found", "less", "known", "saved by draw")


def table() -> Iterator[str]:
    """The lines of the table."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|:---|{'---:|' * (len(COLUMNS) - 1)}"
    for (name, sigma), known in KNOWN.items():
        draws = [_draw(name, sigma, seed) for seed in range(3)]
        mean, found = (sum(spans, Fraction(0)) / len(draws) for spans in zip(*draws, strict=True))
        saved = ", ".join(percent(1 - b / a) for a, b in draws)
        cells = (name, str(sigma), shown(mean), shown(found), percent(1 - found / mean), f"{known}%", saved)
        yield f"| {' | '.join(cells)} |"


def _draw(name: str, sigma: float, seed: int) -> tuple[Fraction, Fraction]:
    """(mean makespan of random orders, makespan of the order found)."""
    rng = random.Random(seed)
    weights = [Fraction(round(1000 * math.exp(rng.gauss(0, sigma))), 1000) for _ in range(MICRO_BATCHES)]
    schedule = SCHEDULES[name].generate(RANKS, MICRO_BATCHES)
    costs = Costs(micro_batches=tuple(weights)).recut(RANKS, schedule.num_stages)
    orders = [rng.sample(range(MICRO_BATCHES), MICRO_BATCHES) for _ in range(20)]
    spans = [simulate(schedule, ordered(costs, order)).makespan for order in (*orders, best_order(schedule, costs))]
    return sum(spans[:-1], Fraction(0)) / 20, spans[-1]


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
