"""The time of `dsc check`, `fmt` and `show` beyond starting Python with the libraries of the language.

    python -m benchmarks.startup [--rounds 40] [--out benchmarks/results/startup.txt]

Commands run in turn, so that other work on the machine affects all of them. The result is the difference of the medians
to `python -c "import pydantic, lark"`. The minimum over rounds approximates an undisturbed machine; CPU time depends
little on other work.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
SPEC = "specs/deepseek-v3.dsc"
BASE = 'python -c "import pydantic, lark"'
DSC = str(Path(sys.executable).with_name("dsc"))
COMMANDS = {
    BASE: [sys.executable, "-c", "import pydantic, lark"],
    f"dsc check {SPEC}": [DSC, "check", SPEC],
    f"dsc fmt --check {SPEC}": [DSC, "fmt", "--check", SPEC],
    f"dsc show {SPEC}": [DSC, "show", SPEC],
    f"dsc show --origin {SPEC}": [DSC, "show", "--origin", SPEC],
}
BUDGET_S = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=40, help="runs of each command")
    parser.add_argument("--out", type=Path, help="also write the table to a file")
    args = parser.parse_args()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        # an installed package has bytecode, so caching is on even if the environment disables it
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = folder
        for _ in range(args.rounds + 1):
            for name, command in COMMANDS.items():
                seconds[name].append(timed(name, command, env))
    text = table({name: runs[1:] for name, runs in seconds.items()})  # the first round warms the file cache
    print(text, end="")
    if args.out:
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return 0


def timed(name: str, command: list[str], env: Mapping[str, str]) -> tuple[float, float]:
    """(wall-clock seconds, CPU seconds) of one run."""
    before, begin = _processor_s(), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    took = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{name} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return took, _processor_s() - before


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(seconds: dict[str, list[tuple[float, float]]]) -> str:
    """Milliseconds of each command, and the difference to the base."""
    machine = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    rounds = len(seconds[BASE])
    lines = [f"{machine}; {rounds} rounds, interleaved; budget: {BUDGET_S * 1000:.0f} ms over the first line", ""]
    lines.append(f"{'milliseconds':<42}{'clock, median':>16}{'clock, least':>16}{'processor, median':>20}")
    base = _figures(seconds[BASE])
    for name, runs in seconds.items():
        cells = [
            f"{1000 * took:.0f} {1000 * (took - start):+5.0f}" for took, start in zip(_figures(runs), base, strict=True)
        ]
        lines.append(f"{name:<42}{cells[0]:>16}{cells[1]:>16}{cells[2]:>20}")
    return "\n".join(lines) + "\n"


def _figures(runs: list[tuple[float, float]]) -> tuple[float, float, float]:
    clock, processor = zip(*runs, strict=True)
    return statistics.median(clock), min(clock), statistics.median(processor)


if __name__ == "__main__":
    sys.exit(main())
