"""Random small cases and the least makespan of each, solved once by `optimum` and stored beside this file.

python -m tests.compiler.schedule.optima [--count 240]     solves the cases not stored yet; some seconds each
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement, V, loop
from compiler.schedule.costs import PAIR_KINDS, Costs, with_every_pair_gaining

STORED = Path(__file__).with_suffix(".json")
SIZES = (
    *((loop(1), ranks, count) for ranks, limit in ((2, 5), (3, 4), (4, 4)) for count in range(2, limit + 1)),
    *((BIDIRECTIONAL, ranks, count) for ranks, limit in ((2, 5), (4, 4)) for count in range(2, limit + 1)),
    *((V, ranks, count) for ranks, limit in ((1, 4), (2, 3), (3, 2), (4, 2)) for count in range(2, limit + 1)),
    *((loop(2), ranks, count) for ranks, limit in ((2, 3), (3, 2)) for count in range(2, limit + 1)),
)


@dataclass(frozen=True)
class Case:
    """The inputs of a bound. Costs and cap are for one stage of the placement."""

    placement: StagePlacement
    num_ranks: int
    num_micro_batches: int
    costs: Costs
    cap: int

    def __str__(self) -> str:
        return f"{self.placement} P={self.num_ranks} N={self.num_micro_batches} cap={self.cap}"


def case(number: int) -> Case:
    """The case with a number: random placement, table of pairs, weights, latency and cap, all with few digits."""
    rng = random.Random(f"optimum {number}")
    placement, ranks, micro_batches = rng.choice(SIZES)
    F, I, W = (Fraction(1),) * 3 if rng.random() < 0.5 else (Fraction(rng.randint(2, 6), 2) for _ in range(3))
    costs = Costs(F, I, W)
    table = rng.choice(("none", "FB", "any", "random"))
    if table in ("FB", "any"):
        gain = Fraction(rng.choice((6, 7, 8, 9)), 10)
        costs = replace(costs, pairs=(("BF", gain * (costs.F + costs.lone_time("B"))),))
        costs = with_every_pair_gaining(costs) if table == "any" else costs
    elif table == "random":
        kinds = [kinds for kinds in PAIR_KINDS if rng.random() < 0.4]
        gains = {kinds: Fraction(rng.choice((5, 6, 8)), 10) for kinds in kinds}
        costs = replace(
            costs, pairs=tuple((k, gains[k] * (costs.lone_time(k[0]) + costs.lone_time(k[1]))) for k in kinds)
        )
    stages = placement.num_stages(ranks)
    uneven = rng.choice(("no", "no", "stages", "ranks"))
    factors = tuple(Fraction(rng.choice((8, 10, 10, 13)), 10) for _ in range(stages if uneven == "stages" else ranks))
    costs = replace(costs, **({} if uneven == "no" else {uneven: factors}))
    costs = replace(costs, latency=Fraction(rng.choice((0, 0, 0, 1, 2)), 2))
    least = placement.stages_per_rank
    return Case(placement, ranks, micro_batches, costs, rng.randint(least, max(least, (ranks + 2) * least)))


def stored() -> Iterator[tuple[Case, Fraction]]:
    """The cases that were solved, each with its least makespan."""
    for number, (text, least) in json.loads(STORED.read_text("utf-8")).items():
        solved = case(int(number))
        assert str(solved) == text, f"case {number} was {text}: solve all again"
        if least is not None:
            yield solved, Fraction(least)


def main() -> None:
    from tests.compiler.schedule.optimal import optimum

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=240, help="how many cases")
    rows = json.loads(STORED.read_text("utf-8")) if STORED.exists() else {}
    for number in range(parser.parse_args().count):
        if str(number) not in rows:
            problem = case(number)
            P, N = problem.num_ranks, problem.num_micro_batches
            least = optimum(problem.placement, P, N, problem.costs, problem.cap, work=1.5)
            rows[str(number)] = (str(problem), None if least is None else str(least))
            lines = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items()]
            STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
            print(number, *rows[str(number)], flush=True)


if __name__ == "__main__":
    main()
