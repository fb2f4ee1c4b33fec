"""The time of `dsc plan`: a process from start to end, on one thread.

    python -m benchmarks.plan [--rounds 5] [--out benchmarks/results/plan.txt]

The minimum over rounds approximates an undisturbed machine. CPU time is the median over rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
DSC = str(Path(sys.executable).with_name("dsc"))
V3 = "specs/deepseek-v3.dsc"
MANY = ("-s", "cluster.nodes=16384", "-s", "train.batch.from=196608", "-s", "train.batch.to=983040")
FOUR = ("parallel.pipeline", "parallel.expert", "train.micro_batch", "recompute")
OPEN = tuple(word for key in FOUR for word in ("-s", f"{key}=auto"))
INTERLEAVED = (*OPEN, "-s", "schedule.name=interleaved")
COMMANDS = {
    "dsc plan, DeepSeek-V3 on 2,048 devices": ("plan", V3),
    "dsc plan, DeepSeek-V3 on 131,072 devices": ("plan", V3, *MANY),
    "dsc plan --format json, DeepSeek-V3 on 2,048 devices": ("plan", V3, "--format", "json"),
    "dsc plan, DeepSeek-V2 on 2,048 devices": ("plan", "specs/deepseek-v2.dsc"),
    "dsc plan, quickstart on 4 CPU ranks": ("plan", "specs/quickstart.dsc"),
    "four open keys, DeepSeek-V3 on 2,048 devices": ("plan", V3, *OPEN),
    "four open keys, interleaved, DeepSeek-V3": ("plan", V3, *INTERLEAVED),
    "four open keys, interleaved, Qwen3-30B on 256": ("plan", "specs/qwen3-30b-a3b.dsc", *INTERLEAVED),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command")
    parser.add_argument("--out", type=Path, help="also write the table to a file")
    args = parser.parse_args()
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(args.rounds + 1):
        for name, command in COMMANDS.items():
            runs[name].append(timed(command))
    text = table({name: rounds[1:] for name, rounds in runs.items()})  # the first round warms the file cache
    print(text, end="")
    if args.out:
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return 0


def timed(command: tuple[str, ...]) -> tuple[float, float]:
    """(wall-clock seconds, CPU seconds) of one run."""
    before, begin = _processor_s(), time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([DSC, *command], cwd=ROOT, env=environment, capture_output=True, check=True)
    return time.perf_counter() - begin, _processor_s() - before


def table(runs: dict[str, list[tuple[float, float]]]) -> str:
    """The table of seconds per command."""
    rounds = len(next(iter(runs.values())))
    machine = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    lines = [f"{machine}; {rounds} rounds, interleaved", ""]
    lines.append(f"{'seconds':<54}{'clock, least':>14}{'clock, median':>15}{'processor, median':>19}")
    for name, times in runs.items():
        clock, processor = zip(*times, strict=True)
        figures = f"{min(clock):>14.2f}{statistics.median(clock):>15.2f}{statistics.median(processor):>19.2f}"
        lines.append(f"{name:<54}{figures}")
    return "\n".join(lines) + "\n"


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
