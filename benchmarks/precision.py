"""Compare the loss curves of a BF16 run, an FP32 run, and an FP32 run from slightly different initial weights.

    python -m benchmarks.precision [--spec specs/quickstart.dsc] [--out benchmarks/results/precision.txt]

All runs see the same samples in the same order. Training amplifies small differences, so the third run shows how large
a meaningless difference is: its initial weights are larger by 2⁻⁸, the largest relative change by one rounding to BF16.
Losses depend only on build and data, not on other work on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dsl.load import load

ROOT = Path(__file__).parent.parent
ROWS = 14  # steps in the table
Curve = Sequence[Mapping[str, Any]]  # one row per step, as in metrics.jsonl
RUNS = ("fp32", "bf16", "fp32, weights +2^-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--spec", type=Path, default=ROOT / "specs" / "quickstart.dsc")
    parser.add_argument("--out", type=Path, help="also write the table to a file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder, f"run_{index}") for index, name in enumerate(RUNS)}
        larger = load(args.spec).model.init_std * (1 + 2.0**-8)
        overrides = (("precision=fp32",), ("precision=bf16",), ("precision=fp32", f"model.init_std={larger!r}"))
        variants = zip(runs.items(), overrides, strict=True)
        curves = {name: trained(args.spec.resolve(), run, *words) for (name, run), words in variants}
    text = table(load(args.spec).name, curves)
    print(text, end="")
    if args.out:
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return 0


def trained(spec: Path, run: Path, *overrides: str) -> Curve:
    """Train in the folder `run` and return the metrics."""
    words = [word for override in overrides for word in ("-s", override)]
    command = [sys.executable, "-m", "compiler.cli.main", "train", str(spec), *words, "--out", str(run)]
    subprocess.run(command, cwd=run.parent, stdout=subprocess.DEVNULL, check=True)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


def table(name: str, curves: Mapping[str, Curve]) -> str:
    """Losses at some steps, then a sentence on the distances of the curves."""
    fp32, bf16, larger = (curves[run] for run in RUNS)
    steps = sorted({round(k * (len(fp32) - 1) / (ROWS - 1)) for k in range(ROWS)})
    lines = [f"{name}: training loss, nats per token", "", f"{'step':>6}" + "".join(f"{run:>22}" for run in RUNS)]
    for k in steps:
        base, *losses = (curve[k]["loss"] for curve in (fp32, bf16, larger))
        cells = "".join(f"{loss:>13.4f} ({loss - base:+.4f})" for loss in losses)
        lines.append(f"{fp32[k]['step']:>6}{base:>22.4f}{cells}")
    return "\n".join([*lines, "", summary(curves), ""])


def summary(curves: Mapping[str, Curve]) -> str:
    """One line: the last validation losses, and the mean distances of the curves over their second halves."""
    fp32, bf16, larger = (curves[run] for run in RUNS)
    half = slice(len(fp32) // 2, None)

    def distance(curve: Curve) -> float:
        return fmean(abs(a["loss"] - b["loss"]) for a, b in zip(curve[half], fp32[half], strict=True))

    validations = [
        [row["validation_loss"] for row in curve if "validation_loss" in row][-1] for curve in curves.values()
    ]
    return (
        f"after {len(fp32)} steps: validation loss {validations[0]:.4f} in FP32, {validations[1]:.4f} in BF16,"
        f" {validations[2]:.4f} in FP32 from weights larger by 2^-8; mean distance of training losses from"
        f" FP32's over the second half: {distance(bf16):.4f} of BF16, {distance(larger):.4f} of the larger weights"
    )


if __name__ == "__main__":
    sys.exit(main())
