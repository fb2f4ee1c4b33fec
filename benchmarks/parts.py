"""Where the processor time of a training step goes: products, other ops, messages and Python, beside the limit.

    python -m benchmarks.parts [--steps 8] [--out benchmarks/results/parts.txt]

Profiles specs/bench-4.dsc in FP32 and in BF16: on one rank, on two by data, and on two by DualPipe. Milliseconds are
processor time of all ranks for a step of 2,048 tokens. The limit is the products of the step alone, on one thread, as
in `make bench`. Other processes on the machine slow it down: leave it idle.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.profile import ROOT, profiled
from benchmarks.speed.contests import ALONE, DUALPIPE
from benchmarks.speed.limit import products_of
from benchmarks.speed.work import work_of
from dsl.load import resolve
from runtime.ops.native import library

SPEC = "specs/bench-4.dsc"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "1 rank": ALONE,
    "data 2": (),
    "DualPipe 4 x 2": (*DUALPIPE, "train.micro_batch=2"),
}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
FUNCTIONS = {"F": "forward", "I": "input gradients", "W": "weight gradients"}
OPTIMIZER = ("zero", "norm", "update")  # phases of a step
OTHERS = "attention", "norms, activations, loss", "routing", "optimizer", "messages", "Python", "other ops"
PARTS = *(f"products, {name}" for name in FUNCTIONS.values()), *OTHERS
ROUNDS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=8, help="number of profiled steps")
    parser.add_argument("--out", type=Path, help="also write the table to a file")
    args = parser.parse_args()
    text = table(args.steps)
    print(text, end="")
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    return 0


def table(steps: int) -> str:
    columns = {
        f"{precision} {layout}": parts(words, precision, steps)
        for precision in PRECISIONS
        for layout, words in LAYOUTS.items()
    }
    limits = {precision: limit_ms(dtype) for precision, dtype in PRECISIONS.items()}
    lines = [f"{SPEC}, {library.identity()}; ms of processor time for a step, of all ranks", ""]
    lines.append(f"{'':30}" + "".join(f"{name:>21}" for name in columns))
    for part in PARTS:
        lines.append(f"{part:30}" + "".join(f"{times[part]:21.1f}" for times in columns.values()))
    totals = {name: sum(times.values()) for name, times in columns.items()}
    lines.append(f"{'all':30}" + "".join(f"{total:21.1f}" for total in totals.values()))
    lines.append(f"{'the products alone':30}" + "".join(f"{limits[name.split()[0]]:21.1f}" for name in columns))
    shares = (limits[name.split()[0]] / total for name, total in totals.items())
    lines.append(f"{'of the limit':30}" + "".join(f"{share:21.0%}" for share in shares))
    return "\n".join(lines) + "\n"


def parts(overrides: tuple[str, ...], precision: str, steps: int) -> Counter[str]:
    """Milliseconds of a step by part, summed over the ranks of a run."""
    options = [word for override in (*overrides, f"precision={precision}") for word in ("-s", override)]
    times: Counter[str] = Counter()
    for rank in profiled((SPEC, *options), steps)["ranks"]:
        for row in rank["rows"]:
            if row["kind"] != "profile":
                times[part_of(row)] += row["processor_ns"] / steps / 1e6
    return times


def part_of(row: dict[str, Any]) -> str:
    """The part that a row of a profile counts to."""
    kind, name = row["kind"], row["name"]
    if kind == "python":
        return "Python"
    if kind != "op":
        return "messages"
    if row["place"] in OPTIMIZER:
        return "optimizer"
    if "linear" in name:
        return f"products, {FUNCTIONS[row['function']]}"
    if "attention" in name:
        return "attention"
    if any(word in name for word in ("permute", "route")) and "norm" not in name:
        return "routing"
    if any(word in name for word in ("norm", "swiglu", "entropy", "embedding")):
        return "norms, activations, loss"
    return "other ops"


def limit_ms(dtype: torch.dtype) -> float:
    """Milliseconds of one thread for the products of a step: the median round."""
    torch.set_num_threads(1)
    spec = resolve(ROOT / SPEC).spec
    step = products_of(work_of(spec.model, spec.train.batch.end, spec.train.sequence), dtype)
    step()
    rounds = []
    for _ in range(ROUNDS):
        begin = time.thread_time_ns()
        step()
        rounds.append((time.thread_time_ns() - begin) / 1e6)
    return statistics.median(rounds)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
