"""Fuzz the language: `python -m tests.fuzz.run --count 1000000`, or `make soak`.

Seeds count from `--start`; failing inputs are kept in tests/fuzz/found, where the tests try them again.
An interrupted run continues with the last printed `--start`.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.fuzz.generate import Input, generated
from tests.fuzz.judge import judged, limit_memory

FOUND = Path(__file__).parent / "found"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=10_000, help="inputs to try")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--every", type=int, default=10_000, help="inputs between two lines of progress")
    parser.add_argument("--most", type=int, default=20, help="failures to stop at")
    parser.add_argument("--keep", type=Path, default=FOUND, help="folder for inputs that fail")
    args = parser.parse_args()
    judged(Input("warm", {"spec.dsc": "run a { }"}))  # imports and validators are made once, outside of the limits
    limit_memory()
    begin, codes, kinds, right, failed = time.monotonic(), Counter[str](), Counter[str](), Counter[str](), 0
    seed = args.start
    for seed in range(args.start, args.start + args.count):
        case = generated(seed)
        kinds[case.kind] += 1
        try:
            case_codes = judged(case)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                print(f"interrupted: go on with --start {seed}")
                return 130
            failed += 1
            keep(args.keep, seed, case, error)
            if failed >= args.most:
                break
            continue
        codes.update(set(case_codes))
        right[case.kind] += not case_codes
        if (seed + 1 - args.start) % args.every == 0 and seed + 1 < args.start + args.count:
            rate = (seed + 1 - args.start) / (time.monotonic() - begin)
            print(
                f"{seed + 1 - args.start:,} inputs, {failed} failed, {rate:.0f}/s; next: --start {seed + 1}", flush=True
            )
    print("kinds: " + ", ".join(f"{kind} {kinds[kind]} ({right[kind]} right)" for kind in sorted(kinds)))
    print(f"codes: {len(codes)}: " + ", ".join(f"{code} {count}" for code, count in sorted(codes.items())))
    print(f"{seed + 1 - args.start:,} inputs, {failed} failed")
    return int(failed > 0)


def keep(folder: Path, seed: int, given: Input, error: BaseException) -> None:
    """Store a failing input, and print the reason."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{given.kind}-{seed}.json"
    path.write_text(given.to_json(), encoding="utf-8")
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    print(f"seed {seed} ({given.kind}): {type(error).__name__} at {place}: {str(error)[:2000]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
