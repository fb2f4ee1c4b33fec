"""Train both runs of `specs/r1-tiny.dsc` (fine-tuning, then rewards) with several seeds:
`python -m benchmarks.r1_tiny [SEED …]`.

Prints the table of docs/reinforcement.md: the share of right answers in the first and last steps, and the time of both
runs. Needs two otherwise idle cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

SPEC = Path(__file__).parents[1] / "specs" / "r1-tiny.dsc"
STEPS = 10  # a share is the mean over this many steps
HEAD = "| seed | right, first 10 steps | last 10 steps | fine-tuning | rewards |\n|---|---|---|---|---|"


def train(run: str, seed: int, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Train a run. Returns its metrics and its seconds."""
    begin, run_folder = time.perf_counter(), folder / "runs" / run
    words = [f"{SPEC}:{run}", "--out", str(run_folder), "-s", f"train.seed={seed}"]
    if run == "r1":
        words += ["-s", f'train.initial="{folder / "runs" / "r1_sft"}"']
    command = [sys.executable, "-P", "-m", "compiler.cli.main", "train", *words]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return rows, time.perf_counter() - begin


def right(rows: list[dict[str, Any]]) -> float:
    """The mean share of right answers."""
    return fmean(row["rewards"]["right"] for row in rows)


def main() -> None:
    print(HEAD)
    for seed in [int(word) for word in sys.argv[1:]] or [1, 2, 3]:
        with TemporaryDirectory() as name:
            _, tuning_s = train("r1_sft", seed, Path(name))
            rows, rewards_s = train("r1", seed, Path(name))
        shares = f"{right(rows[:STEPS]):.1%} | {right(rows[-STEPS:]):.1%}"
        print(f"| {seed} | {shares} | {tuning_s:.0f} s | {rewards_s:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
