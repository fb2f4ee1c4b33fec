"""The cost of checkpoints: a run that writes them in the background, and one that waits for each, alternately.

    python -m benchmarks.saves specs/tiny.dsc -s train.steps=200      # a spec, with any overrides; prints a table

Every run saves each 10th step, or as `--every` says. All columns are medians: `waited` is the time that a save blocks
training, `written in` that from its start to its publication, `next step` the extra time of the step after a save over
the step before it. On a CPU the writing thread needs a core: leave one free. Exit codes: 0 measured · 1 a run failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FIRST = 20  # steps left out as warm-up
COLUMNS = ("written", "saves", "bytes", "step", "waited", "written in", "next step")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("-s", "--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--every", type=int, default=10, help="steps between saves; default: 10")
    args = parser.parse_args()
    rounds_of: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for background in rounds_of:
                run = Path(folder) / f"{number}-{background}"
                changes = [*args.set, f"train.checkpoint.every={args.every}", "train.checkpoint.keep=2"]
                changes += [f"train.checkpoint.background={str(background).lower()}"]
                words = [word for change in changes for word in ("-s", change)]
                command = [
                    sys.executable,
                    "-m",
                    "compiler.cli.main",
                    "train",
                    str(args.spec),
                    "--out",
                    str(run),
                    *words,
                ]
                if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
                    return 1
                rounds_of[background].append(measured(run))
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for background, rounds in rounds_of.items():
        print(row("in the background" if background else "at once", rounds))
    return 0


def measured(run: Path) -> dict[str, float]:
    """Medians of a run, in seconds and bytes, without its last save."""
    saves = [event for event in _lines(run / "events.jsonl") if event["event"] == "save"][:-1]
    saves = [event for event in saves if event["step"] >= FIRST]
    steps = {line["step"]: line["step_s"] for line in _lines(run / "metrics.jsonl")}
    before = [steps[save["step"]] for save in saves]
    return {
        "saves": len(saves),
        "bytes": saves[0]["bytes"],
        "step_s": statistics.median(before),
        "waited_s": statistics.median(save["seconds"] for save in saves),
        "written_s": statistics.median(save["written_s"] for save in saves),
        "next": statistics.median(steps[save["step"] + 1] for save in saves) / statistics.median(before),
    }


def row(name: str, rounds: list[dict[str, float]]) -> str:
    """One line of the table: the round with the shortest step, which was disturbed the least."""
    best = min(rounds, key=lambda medians: medians["step_s"])
    times = (f"{best[key] * 1e3:,.1f} ms" for key in ("step_s", "waited_s", "written_s"))
    cells = (name, f"{best['saves']:.0f}", f"{best['bytes'] / 1e6:,.1f} MB", *times, f"{best['next'] - 1:+.1%}")
    return "| " + " | ".join(cells) + " |"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
