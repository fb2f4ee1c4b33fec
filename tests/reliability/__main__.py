"""Run the tests and programs of docs/reliability.md, and write it: `python -m tests.reliability [--rows R1,R6]`.

All rows take an hour on two cores. Earlier results that are not run now are kept: `--missing` runs the rest,
`--rows none` only writes the page.
"""

from __future__ import annotations

import argparse
import sys

from tests.reliability.page import PAGE, chosen, reached, write
from tests.reliability.results import Results, keep, kept, run_program, run_tests
from tests.reliability.rows import ROWS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", default="", help="numbers of rows, with commas; none: only write the page")
    parser.add_argument("--missing", action="store_true", help="run only what has no result yet")
    args = parser.parse_args()
    rows = [] if args.rows == "none" else chosen([number for number in args.rows.split(",") if number])
    passed_over = kept() if args.missing else {}
    results: Results = {}
    tests = dict.fromkeys(test for row in rows for test in row.tests if test not in passed_over)
    if tests:
        results |= run_tests([*tests])
    for program in dict.fromkeys(program for row in rows for program in row.programs):
        if program.name not in passed_over:
            results[program.name] = run_program(program)
    keep(kept() | results)  # read now: another row may have been run meanwhile
    write(kept())
    for row in rows:
        print(f"{row.number}: {': '.join(reversed(reached(row, kept())))}")
    print(f"written: {PAGE}")
    return int(any(reached(row, kept())[1] == "no" for row in (rows or ROWS)))


if __name__ == "__main__":
    sys.exit(main())
