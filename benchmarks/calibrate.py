"""Compare the predicted and measured step time of CPU runs, after `dsc calibrate` on the machine that they run on.

    python -m benchmarks.calibrate [SPEC …] [--out benchmarks/results/calibrate.txt]

For each spec: `dsc calibrate SPEC -o rates.json`, the prediction with that table, then two runs of different lengths.
Wall-clock columns are the median and the minimum step after warm-up; the minimum is closest to an idle machine.
CPU-time columns are the CPU time of all ranks per step, from the difference of the two runs; other work on the machine
changes it little. Nothing is fitted to a step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from compiler.machine.rates import read_table
from compiler.plan.spec_rates import rates_of
from compiler.predict.predict import predict
from dsl.load import load

ROOT = Path(__file__).parent.parent
SPECS = ("specs/tiny.dsc", "specs/laptop-gqa.dsc", "specs/quickstart.dsc")
WARM_UP, SHORT = 3, 4  # warm-up steps that are left out; steps of the short run
LONG_S, LEAST_STEPS, MOST_STEPS = 12, 24, 500  # target seconds, and limits on the steps, of the long run
GOAL = 0.15


@dataclass(frozen=True)
class Row:
    """Seconds per step. `processor`: CPU time."""

    name: str
    ranks: int
    predicted: float
    median: float
    least: float
    processor_predicted: float
    processor: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("specs", nargs="*", default=SPECS, help=f"default: {' '.join(SPECS)}")
    parser.add_argument("--out", type=Path, help="also write the table to a file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for spec in args.specs:
            rows.append(compared(Path(spec), Path(folder)))
            print(rows[-1], file=sys.stderr)
    text = table(rows)
    print(text, end="")
    if args.out:
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return 0


def compared(file: Path, folder: Path) -> Row:
    """Calibrate, predict and run one spec."""
    rates_file, build = folder / f"{file.stem}.json", folder / file.stem
    _run("compiler.cli.main", "calibrate", str(file), "-o", str(rates_file))
    spec = load(file)
    rates = rates_of(spec, read_table(rates_file))
    predicted_s = predict(spec, rates=rates).step.seconds
    alone = predict(spec, rates=replace(rates, cores=None)).step  # as if each rank had its own core
    steps = min(MOST_STEPS, max(LEAST_STEPS, round(LONG_S / predicted_s)))
    _run("compiler.cli.main", "compile", str(file), "-o", str(build))
    used = {}
    for count in (1, SHORT, steps):  # the first run prepares the data
        before = _processor_s()
        run = folder / f"{file.stem}-{count}"
        _run("runtime.run.train", str(build), "--out", str(run), "--data", str(file.parent), "--steps", str(count))
        used[count] = _processor_s() - before
    lines = (folder / f"{file.stem}-{steps}" / "metrics.jsonl").read_text("utf-8").splitlines()
    times = [json.loads(line)["step_s"] for line in lines if "step_s" in line][WARM_UP:]
    return Row(
        name=file.stem,
        ranks=spec.cluster.world,
        predicted=predicted_s,
        median=statistics.median(times),
        least=min(times),
        processor_predicted=sum(rank.busy_s + rank.optimizer_s for rank in alone.ranks) * spec.parallel.data,
        processor=(used[steps] - used[SHORT]) / (steps - SHORT),
    )


def _run(module: str, *arguments: str) -> None:
    command = [sys.executable, "-P", "-m", module, *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(rows: list[Row]) -> str:
    """Milliseconds per step, and the relative error of the prediction."""
    cores, load_s = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    lines = [
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores; "
        f"load of the machine at the end: {load_s:.1f}; goal: within {GOAL:.0%}",
        "",
        f"{'ms per step':<16}{'ranks':>6}{'predicted':>11}{'median':>16}{'least':>16}"
        f"{'processor: pred.':>19}{'used':>16}",
    ]
    for row in rows:
        cells = [
            f"{1000 * value:.1f} {predicted / value - 1:+6.1%}"
            for predicted, value in (
                (row.predicted, row.median),
                (row.predicted, row.least),
                (row.processor_predicted, row.processor),
            )
        ]
        lines.append(
            f"{row.name:<16}{row.ranks:>6}{1000 * row.predicted:>11.1f}{cells[0]:>16}{cells[1]:>16}"
            f"{1000 * row.processor_predicted:>19.1f}{cells[2]:>16}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
