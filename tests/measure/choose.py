"""`python -m tests.measure.choose FOLDER`: writes tests/landing.txt from what `make mutants` measured in FOLDER.

FOLDER has the folders `test` and `landing`, so that all tests of both tiers were measured.

The cases of a test take at most SHARE_S of the processor in `make test`, or CASE_S each, and a test of one case at most
WHOLE_S. Of other tests, a share of the cases stays, or none. Then tests that are the only ones to execute a probed
place come back, the cheapest per place first, unless a test takes more than PLACE_S per place.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path

from tests.measure.mutants import Measured, read_tests

FILE = Path(__file__).parents[1] / "landing.txt"
SHARE_S, CASE_S, WHOLE_S, PLACE_S = 0.8, 0.03, 2.0, 5.0
HEAD = """\
# Tests that `make landing` runs, and `make test` does not, by the beginning of their ids. Of several rows the longest
# decides.
# PREFIX 1/N: of each function one of N cases stays in `make test`, the first among them; of PREFIX alone none stays.
# Written by `python -m tests.measure.choose`, which says how it chooses.
"""

Cases = list[Measured]


def seconds(cases: Cases) -> float:
    return sum(max(0.0, case.seconds) for case in cases)


def executed(cases: Cases) -> set[str]:
    return set[str]().union(*(case.executed for case in cases))


def first_choice(cases: Cases) -> int:
    """N if one of N cases stays: 1 for all, 0 for none."""
    total = seconds(cases)
    if total <= max(SHARE_S if len(cases) > 1 else WHOLE_S, CASE_S * len(cases)):
        return 1
    share = min(len(cases), math.ceil(total / SHARE_S))
    return share if len(cases) > 1 and seconds(cases[::share]) <= WHOLE_S else 0


def staying(cases: Cases, share: int) -> Cases:
    return cases[::share] if share else []


def value(case: Measured, missing: set[str]) -> float:
    """Places that a case executes of those that are missing, for each second."""
    return len(case.executed & missing) / (max(0.0, case.seconds) + 0.1)


def choose(functions: dict[str, Cases]) -> dict[str, int]:
    """For each function N, if one of N cases stays in `make test`."""
    shares = {name: first_choice(cases) for name, cases in functions.items()}
    stay = executed([case for name, cases in functions.items() for case in staying(cases, shares[name])])
    missing = executed([case for cases in functions.values() for case in cases]) - stay
    while missing:
        moved = [(name, index) for name, share in shares.items() if share != 1 for index in range(len(functions[name]))]

        worth = {(name, index): value(functions[name][index], missing) for name, index in moved}
        name, index = max(moved, key=worth.__getitem__)
        if worth[name, index] < 1 / PLACE_S:
            break
        cases = functions[name]
        shares[name] = max(share for share in range(1, len(cases) + 1) if index % share == 0)
        missing -= executed(staying(cases, shares[name]))
    return shares


def rows(functions: dict[str, Cases]) -> list[str]:
    shares = choose(functions)
    lines = []
    for name, share in shares.items():
        prefixes = [prefix for prefix in shares if prefix != name and name.startswith(prefix) and shares[prefix] != 1]
        if share != 1 or prefixes:
            lines.append(f"{name} 1/{share}" if share else name)
    return lines


def main() -> None:
    folder = Path(sys.argv[1])
    functions: dict[str, Cases] = defaultdict(list)
    for tier in ("test", "landing"):
        for test in read_tests(folder / tier).values():
            functions[test.function].append(test)
    FILE.write_text(HEAD + "\n" + "\n".join(rows(dict(sorted(functions.items())))) + "\n", "utf-8")


if __name__ == "__main__":
    main()
