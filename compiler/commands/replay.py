"""`dsc replay RUN STEP`: train a step of a run again, from the nearest checkpoint before it, and compare its rows.

dsc replay runs/quickstart 57            from the checkpoint of step 50: losses, gradient norms and loads, bit for bit
dsc replay runs/quickstart 57 --out why  the same, and keep what was trained again

A step has the same bits each time under the same build, versions and number of threads. So where a row differs, and dsc
did not say what differs here, a device computed something wrong, in the run or now; a second replay tells which. Of a
run with phases, the phase of the step is trained again.

The run is not changed. What is trained again is in RUN/replay-STEP, which is removed if all rows are equal.

Exit codes: 0 all rows are equal · 1 a rank failed, or a row differs · 2 the run has no such step, or cannot be trained
again · 3 hung · 75 a disk is full: try again later
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compiler.commands.common import EXIT_DIFFERS, say, wrong
from compiler.commands.train_processes import call
from compiler.report.run_page import step_rows
from compiler.textfile import TextFileError
from runtime.build_files import read
from runtime.checkpoint.manifest_file import CHECKPOINTS, manifests
from runtime.checkpoint.shard_manifest import CheckpointError
from runtime.outcome import printable
from runtime.run_copy import FILES, described

JSON_VERSION = 1
METRICS, EVENTS, DATA, HEALTH = "metrics.jsonl", "events.jsonl", "data", "health.json"
# What differs between two trainings of one step, and what only a last step or a due one has.
TIMED = frozenset({"time", "tokens_per_s", "step_s"})
AT_THE_END = ("validation_",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="run folder, written by dsc train or torchrun")
    parser.add_argument("step", metavar="STEP", type=_step, help="a step that the run trained")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="folder for what is trained again, which is kept")
    parser.add_argument(
        "--data", metavar="DIR", type=Path, default=Path(), help="folder that the data's paths are relative to"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text or json (docs/json.md)")


def _step(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 10**18):
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: they are counted from 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Train the step again and compare; the exit code."""
    folder, step = args.run_folder, args.step
    if not folder.is_dir():
        return wrong(
            f"there is no folder {printable(str(folder))}", "`dsc train` writes the folder of a run", args.format
        )
    try:
        rows = {row["step"]: row for row in step_rows(folder / METRICS)[0]}
    except TextFileError as error:
        return wrong(printable(str(error)), how=args.format)
    if step not in rows:
        there = f"its steps are {min(rows)} to {max(rows)}" if rows else "it has trained no step"
        return wrong(f"{printable(str(folder))} has no row of step {step}: {there}", how=args.format)
    phase = rows[step].get("phase")
    spec = described(folder, phase if isinstance(phase, int) else None) / FILES[0]
    out = args.out or folder / f"replay-{step}"
    try:
        begun = _prepared(folder, step, out)
    except FileExistsError:
        return wrong(f"{printable(str(out))} is there already", "remove it, or name another with --out", args.format)
    except (CheckpointError, OSError) as error:
        return wrong(printable(str(error)), how=args.format)
    if code := _compiled(spec, out):
        shutil.rmtree(out)  # nothing was trained
        return code
    if code := _trained(args, out, step):
        return code
    again = {row["step"]: row for row in step_rows(out / "run" / METRICS)[0]}
    differing = [
        differs for at in range(begun + 1, step + 1) if (differs := differences(at, rows.get(at), again.get(at)))
    ]
    if args.format == "json":
        print(json.dumps(document(begun, step, differing), indent=2))
    else:
        print(text(begun, step, differing))
    if differing:
        say(f"what was trained again: {out}")
        return EXIT_DIFFERS
    if args.out is None:
        shutil.rmtree(out)
    return 0


def _prepared(run: Path, step: int, out: Path) -> int:
    """Fill the folder with what a training up to the step begins with; the step that it begins behind.

    Checkpoint and data are linked, for nothing changes files of either.
    """
    out.mkdir(parents=True)
    found = [(path, manifest) for path, manifest in manifests(run / CHECKPOINTS)[0] if manifest.step < step]
    nearest = max(found, key=lambda each: each[1].step, default=None)
    if nearest is not None:
        path, manifest = nearest
        _link(path, out / "run" / CHECKPOINTS / path.name)
    if (run / HEALTH).is_file():
        shutil.copyfile(run / HEALTH, out / "run" / HEALTH)  # which samples were given up
    if (run / DATA).is_dir():
        _link(run / DATA, out / "run" / DATA)
    return 0 if nearest is None else manifest.step


def _link(source: Path, target: Path) -> None:
    """Link the files of a folder into another one, all but hidden ones; they are copied to another file system."""

    def link(file: str, to: str) -> None:
        try:
            os.link(file, to)
        except OSError:
            shutil.copyfile(file, to)

    shutil.copytree(source, target, copy_function=link, ignore=shutil.ignore_patterns(".*"))


def _compiled(spec: Path, out: Path) -> int:
    """Compile the run as it was described; the exit code."""
    return call(["compiler.cli", "compile", str(spec), "-o", str(out / "build")], quiet=True)


def _trained(args: argparse.Namespace, out: Path, step: int) -> int:
    """Train the build up to the step; the exit code."""
    say(f"training step {step} again")
    was, now = _build_of(args.run_folder, step), read(out / "build").digest
    if was not in (None, now):
        say(f"the run trained step {step} with build {was}, and this is {now}: roundings may differ")
    words = ["--out", str(out / "run"), "--data", str(args.data), "--steps", str(step), "--resume", "--no-copies"]
    return call(["runtime.train", str(out / "build"), *words], quiet=args.format == "json")


def _build_of(run: Path, step: int) -> str | None:
    """The digest of the build that trained a step last, by the events of the run; None where they do not say."""
    try:
        rows, _ = step_rows(run / EVENTS)
    except TextFileError:
        return None
    starts = [row for row in rows if row.get("event") == "start" and row["step"] < step]
    return str(starts[-1].get("build")) if starts else None


def differences(step: int, was: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What differs between the rows of a step, by key; None if nothing does, or if the run has no row of the step."""
    if was is None:
        return None
    if now is None:
        return {"step": step, "keys": {"step": {"run": step, "replay": None}}}
    keys = {key for key in was.keys() & now.keys() if key not in TIMED}
    keys |= {key for key in was.keys() ^ now.keys() if key not in TIMED and not key.startswith(AT_THE_END)}
    found = {key: {"run": was.get(key), "replay": now.get(key)} for key in sorted(keys) if was.get(key) != now.get(key)}
    return {"step": step, "keys": found} if found else None


def text(begun: int, step: int, differing: Sequence[Mapping[str, Any]]) -> str:
    """The result for people."""
    steps = f"step {step}" if begun + 1 == step else f"steps {begun + 1} to {step}"
    if not differing:
        return f"{steps}: equal to the run, bit for bit"
    first = differing[0]
    lines = [f"{steps}: step {first['step']} is the first that differs"]
    lines += [f"  {key}: {each['run']!r} in the run, {each['replay']!r} now" for key, each in first["keys"].items()]
    return "\n".join(map(printable, lines[:1])) + "".join(f"\n{printable(line)}" for line in lines[1:])


def document(begun: int, step: int, differing: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result for programs, docs/json.md."""
    return {"version": JSON_VERSION, "from_step": begun, "step": step, "equal": not differing, "differs": [*differing]}
