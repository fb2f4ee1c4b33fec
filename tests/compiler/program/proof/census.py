"""The proof's decisions on mutants against the executor's results: `python -m tests.compiler.program.proof.census
--count 5000`.

A mutant is equivalent if it ends like the program in every run of the executor: with each rank as the slowest, and in a
few random interleavings. The proof should accept no other mutant. Prints a table; exit code 1 below 99%.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from compiler.ir import Plan, Program
from compiler.program.proof import ProofError, prove
from tests.compiler.program.proof.executor import Symbols, outcomes
from tests.compiler.program.proof.mutants import mutant
from tests.compiler.program.proof.programs import AGAIN, FAMILY, REWARDED, SPLIT, family_program

LEAST = 0.99


@dataclass
class Tally:
    """Mutants of a program. `missed`: the mutations that were accepted although the result differs."""

    different: int = 0
    rejected: int = 0  # of those that are different
    equivalent: int = 0
    accepted: int = 0  # of those that are equivalent
    missed: Counter[str] = field(default_factory=Counter)

    def __iadd__(self, other: Tally) -> Tally:
        self.different += other.different
        self.rejected += other.rejected
        self.equivalent += other.equivalent
        self.accepted += other.accepted
        self.missed += other.missed
        return self

    def __str__(self) -> str:
        return (
            f"{self.different} end otherwise, {self.rejected} of them rejected; "
            f"{self.equivalent} end alike, {self.accepted} of them accepted"
        )


def accepted(program: Program, plan: Plan) -> bool:
    try:
        prove(program, plan)
    except ProofError:
        return False
    return True


def tally(program: Program, plan: Plan, count: int, seed: int) -> Tally:
    """Mutants of a proven program until `count` of them are not equivalent to it."""
    symbols, generator, result = Symbols(), random.Random(seed), Tally()
    reference = outcomes(program, plan, symbols)
    assert {outcome.fault for outcome in reference} == {""}, reference[0].fault
    assert len(set(reference)) == 1, "a proven program ends alike in every interleaving"
    while result.different < count:
        name, changed = mutant(program, generator)
        holds = accepted(changed, plan)
        if outcomes(changed, plan, symbols, reference) == reference:
            result.equivalent += 1
            result.accepted += holds
        else:
            result.different += 1
            result.rejected += not holds
            if holds:
                result.missed[name] += 1
    return result


def census(
    count: int, seed: int, family: Iterable[tuple[str, int, int]] = FAMILY
) -> Iterator[tuple[tuple[str, int, int], Tally]]:
    """`count` mutants that end otherwise, spread evenly over the family."""
    rows = list(family)
    for index, row in enumerate(rows):
        share = count * (index + 1) // len(rows) - count * index // len(rows)
        yield row, tally(*family_program(*row), share, seed + index)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=5000, help="mutants that end otherwise than their program")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    total = Tally()
    for (name, ranks, micro_batches), row_counts in census(args.count, args.seed, (*FAMILY, *SPLIT, *AGAIN, *REWARDED)):
        print(f"{name:14} P={ranks} N={micro_batches}: {row_counts}", flush=True)
        total += row_counts
    print(f"in all: {total}: {total.rejected / total.different:.2%}")
    for name, times in total.missed.most_common():
        print(f"  missed {times}: {name}")
    return int(total.rejected < LEAST * total.different)


if __name__ == "__main__":
    sys.exit(main())
