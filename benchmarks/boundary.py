"""What the boundary of a Python reward costs: the time to start its process, and the time of a call.

    python -m benchmarks.boundary [--rounds 40] [--calls 500] [--out benchmarks/results/boundary.txt]

Processes with a boundary and without one start in turn, so that other work on the machine affects both. The process
without one begins with a filter that refuses namespaces, as a host does that allows none. A call scores 64 completions
of 1,000 characters by their length.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from runtime.contract import RewardRecipe
from runtime.data.rewards.scoring import Case, Rewards

OPEN = "from runtime.system import kernel; kernel.drop_capabilities(); kernel.refuse_calls()"
MEASURE = "from benchmarks.boundary import measured; print(*measured({calls}))"
REWARD = "def reward(completions, **_):\n    return [len(completion) for completion in completions]\n"
KINDS = {"with a boundary": "", "without": OPEN}


def measured(calls: int) -> tuple[float, float, str]:
    """Return the seconds to start a reward and the median seconds of a call, and why it has no boundary."""
    recipe = RewardRecipe("length", "python", 1.0, file="rewards/length.py", seconds=60.0)
    cases = [Case("question", "x" * 1000, {"answer": "1"})] * 64
    start = time.perf_counter()
    with Rewards((recipe,), {"length": REWARD}) as rewards:
        start_s, seconds = time.perf_counter() - start, []
        for _ in range(calls):
            start = time.perf_counter()
            rewards.score(cases)
            seconds.append(time.perf_counter() - start)
        return start_s, statistics.median(seconds), rewards.no_boundary or ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=40, help="processes of each kind")
    parser.add_argument("--calls", type=int, default=500, help="calls of each process")
    parser.add_argument("--out", type=Path, help="also write the table to a file")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(args.rounds):
        for kind, first in KINDS.items():
            code = f"{first}\n{MEASURE.format(calls=args.calls)}"
            output = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
            start_s, call_s, *reason = output.split(maxsplit=2)
            if bool(reason) != bool(first):
                print(f"{kind}: the host decides otherwise: {' '.join(reason)}", file=sys.stderr)
                return 1
            found[kind].append((float(start_s), float(call_s)))
    lines = [f"{platform.machine()}, Linux {platform.release()}, {os.cpu_count()} cores, {args.rounds} processes each"]
    lines.append(f"{'':<16} {'start, median':>14} {'least':>9} {'call, median':>13}")
    for kind, rounds in found.items():
        starts, calls = zip(*rounds, strict=True)
        lines.append(
            f"{kind:<16} {statistics.median(starts) * 1e3:>11.1f} ms {min(starts) * 1e3:>6.1f} ms"
            f" {statistics.median(calls) * 1e6:>10.0f} µs"
        )
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
