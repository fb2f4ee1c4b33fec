"""Profile training on this machine: `dsc train --profile` of several specs, and the GEMM rate of a core.

    python -m benchmarks.profile [NAME …] [--steps 5] [--out benchmarks/results]

NAME: a key of RUNS; default: all. Each writes OUT/profile-<name>.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from compiler.tools.report.profile_text import text
from runtime.ops.product import product_

ROOT = Path(__file__).parent.parent
DSC = str(Path(sys.executable).with_name("dsc"))
RUNS = {
    "quickstart": ("specs/quickstart.dsc", "-s", "precision=fp32"),
    "bench-4": ("specs/bench-4.dsc",),
}
GEMM = 1024  # rows, columns and inner extent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", choices=[*RUNS, []], metavar="NAME")
    parser.add_argument("--steps", type=int, default=5, help="number of profiled steps")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the tables")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or RUNS:
        report = profile(RUNS[name], args.steps)
        print(report)
        (args.out / f"profile-{name}.txt").write_text(report, encoding="utf-8")
    return 0


def profile(words: tuple[str, ...], steps: int) -> str:
    """Train in a temporary folder and return the table."""
    document, rate = profiled(words, steps), gemm_rate()
    document["gemm_flops_s"] = document["gemm_flops_s"] or rate
    machine = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
    core = f"{rate / 1e9:.0f} GFLOP/s of a core in FP32 products of {GEMM} x {GEMM} x {GEMM}"
    head = f"dsc train {' '.join(words)} --profile {steps}\n{machine}, {os.cpu_count()} cores; {core}\n"
    return f"{head}\n{text(document)}"


def profiled(words: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Train in a temporary folder. Returns the profile: docs/json.md describes profile.json."""
    spec, *options = words
    with tempfile.TemporaryDirectory(prefix="dsc-profile-") as folder:
        command = [DSC, "train", str(ROOT / spec), *options, "--profile", str(steps), "--out", f"{folder}/run"]
        subprocess.run(command, cwd=folder, env=_environment(), stdout=subprocess.DEVNULL, check=True)
        document: dict[str, Any] = json.loads((Path(folder) / "run" / "profile.json").read_text("utf-8"))
    return document


def gemm_rate(calls: int = 20) -> float:
    """FLOP/s of one core by thread CPU time, which other work on the machine does not change: the best of `calls`."""
    torch.set_num_threads(1)
    x, w, y = (torch.randn(GEMM, GEMM) for _ in range(3))
    took = []
    for _ in range(calls):
        begin = time.thread_time_ns()
        product_(y, x, w)
        took.append(time.thread_time_ns() - begin)
    return 2 * GEMM**3 / min(took) * 1e9


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
