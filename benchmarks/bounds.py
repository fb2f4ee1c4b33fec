"""The gap between the lower bound and the optimal makespans stored with the tests (tests/compiler/schedule/optima.py).

python -m benchmarks.bounds     about 20 s; prints the table of docs/schedules.md
"""

from __future__ import annotations

import sys
import time
from fractions import Fraction
from unittest import mock

from compiler.schedule import bound
from compiler.schedule.bound import lower_bound
from tests.compiler.schedule.optima import Case, stored

WAYS = {  # (largest number of actions whose waits are followed, largest number of search steps)
    "phases and memory of each rank": (0, 0),
    "and waits": (bound._MOST_WAITS, 0),
    "and all steps of a rank": (bound._MOST_WAITS, bound.QUICK),
}


def main() -> None:
    cases = list(stored())
    print("| | mean gap | largest gap | bound = least makespan |\n|---|---:|---:|---:|")
    for name, (waits, work) in WAYS.items():
        begin = time.process_time()
        with mock.patch.object(bound, "_MOST_WAITS", waits), mock.patch.object(bound, "QUICK", work):
            gaps = gaps_of(cases)
        print(f"{(time.process_time() - begin) / len(cases):.3f} s a case", file=sys.stderr)
        mean, equal = float(sum(gaps) / len(gaps)), sum(gap == 0 for gap in gaps)
        print(f"| {name} | {mean:.2%} | {float(max(gaps)):.1%} | {equal} of {len(gaps)} |")


def gaps_of(cases: list[tuple[Case, Fraction]]) -> list[Fraction]:
    """How much longer than the bound each least makespan is."""
    gaps = []
    for case, least in cases:
        P, N = case.num_ranks, case.num_micro_batches
        gaps.append(least / lower_bound(case.placement, P, N, case.costs, case.cap) - 1)
    return gaps


if __name__ == "__main__":
    main()
