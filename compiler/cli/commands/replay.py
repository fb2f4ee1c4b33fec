"""`dsc replay RUN STEP`: train a step of a run again, from the last checkpoint before it, and compare.

dsc replay runs/quickstart 57             starts from step 50; compares losses, gradient norms, loads
dsc replay runs/quickstart 57 --swap all  also with each rank on the device of the next, to find a faulty device
dsc replay runs/quickstart 57 --swap 1,3  the same, with the devices of ranks 1 and 3 exchanged
dsc replay runs/quickstart 57 --out why   keep the results in the folder why

With the same build, versions and number of threads, a step has the same bits each time. If a number differs and dsc
reports no other difference, a device computed something wrong, in the run or now. A step whose numbers ended the run or
rolled it back can be trained again too. In a run with phases, the phase of the step is trained.

With --swap the step is trained twice: on the devices of the run, and with devices exchanged. The verdict is one of:

    real       the same bits on both: the number comes from the weights and the data
    transient  the devices now compute different bits than in the run: a transient error
    device     different bits on another device: the suspect device is named
    unknown    build or versions differ from the run's, or no two trainings agree

In --swap, numbers past the last rank name devices of this machine that no rank uses: --swap 1,4. On CPUs a device is a
core, and ranks are pinned to cores.

The run is not changed. The new trainings are in RUN/replay-STEP, with the comparison in replay.json. The folder is
removed if nothing differs.

Exit codes: 0 equal, or real · 1 a rank failed, or a number differs, or unknown · 2 the run has no such step, or cannot
be trained again · 3 hung · 4 transient · 5 device · 75 a disk is full: try again later
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.cli.commands.common import EXIT_DIFFERS, report_error, say
from compiler.cli.commands.replay_verdict import RecordedTraining, Suspect, Verdict, compare_steps, suspects, verdict
from compiler.files.text import TextFileError, json_of, read_text
from compiler.tools.processes import call
from runtime.build.files import read
from runtime.build.run_copy import FILES, folder_of_phase
from runtime.checkpoint.shard_manifest import CHECKPOINTS, CheckpointError, Manifest, manifests
from runtime.system.outcome import printable
from runtime.system.regular_files import write

JSON_VERSION = 1
DATA, HEALTH = "data", "health.json"
MAX_HEALTH_BYTES = 64 << 20
TRAINED = "run"  # subfolder of --out: the step on the devices of the run
SHOWN = "replay.json"  # in --out: the comparison, written when all trainings have finished
DEVICES = ("cpu", "cuda", "shared")
SURROUNDINGS = ("build", "torch", "ops", "device", "ranks")  # fields of a start event on which bits depend
EXIT_OF: dict[Verdict, int] = {"real": 0, "transient": 4, "device": 5, "unknown": EXIT_DIFFERS}
INTERRUPTED = 128  # exit codes from here on: stopped by a signal
ON_THEIRS, ALL = "+0", "+1"  # each rank on its own device, or on the next rank's (runtime/observe/slots.py)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="run folder, written by dsc train or torchrun")
    parser.add_argument("step", metavar="STEP", type=step_number, help="a step that the run trained, or a bad step")
    parser.add_argument(
        "--swap",
        metavar="A,B|all",
        type=_swap,
        help="also train with the devices of ranks A and B exchanged, or with each rank on the device of the next one",
    )
    parser.add_argument("--device", choices=DEVICES, help="default: the run's")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="folder for the new trainings, which is kept")
    parser.add_argument(
        "--data", metavar="DIR", type=Path, default=Path(), help="folder that the data's paths are relative to"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text or json (docs/json.md)")


def step_number(text: str) -> int:
    """Parse a step number."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 10**18):
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: steps count from 1")
    return int(text)


def _swap(text: str) -> str:
    """Parse --swap into the form of runtime/observe/slots.py."""
    if text == "all":
        return ALL
    if not (match := re.fullmatch("([0-9]{1,7}),([0-9]{1,7})", text, re.ASCII)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither two ranks, such as 1,3, nor all")
    first, second = map(int, match.groups())
    if first == second:
        raise argparse.ArgumentTypeError(f"{text!r}: name two different ranks")
    return f"{first},{second}"


@dataclass(frozen=True)
class Replay:
    """A step to train again in the folder `out`."""

    args: argparse.Namespace
    run: RecordedTraining
    out: Path

    @property
    def step(self) -> int:
        return int(self.args.step)

    @property
    def device(self) -> str:
        """The --device of the trainings: the option, or the run's."""
        device = self.run.start_of(self.step).get("device")
        return self.args.device or (device if device in DEVICES else "cpu")


def run(args: argparse.Namespace) -> int:
    """Train the step again and compare. Returns the exit code."""
    folder, step = args.run_folder, args.step
    if not folder.is_dir():
        return report_error(
            f"there is no folder {printable(str(folder))}", "`dsc train` writes run folders", args.format
        )
    try:
        trained = RecordedTraining.read(folder)
    except TextFileError as error:
        return report_error(printable(str(error)), output_format=args.format)
    rows = trained.rows
    if step not in rows and not any(bad_step == step for bad_step, _ in trained.bad):
        extent = f"its steps are {min(rows)} to {max(rows)}" if rows else "it has trained no step"
        return report_error(f"{printable(str(folder))} has no row for step {step}: {extent}", output_format=args.format)
    replay = Replay(args, trained, args.out or folder / f"replay-{step}")
    try:
        replay.out.mkdir(parents=True)
    except FileExistsError:
        hint = "remove it, or name another with --out"
        return report_error(f"{printable(str(replay.out))} already exists", hint, args.format)
    except OSError as error:
        return report_error(printable(str(error)), output_format=args.format)
    code = EXIT_DIFFERS
    try:
        code, keeps = _replay(replay)
    except KeyboardInterrupt:
        keeps = False
        raise
    finally:
        if args.out is None and not keeps:
            shutil.rmtree(replay.out, ignore_errors=True)
    if keeps:
        say(f"the new trainings are in {replay.out}")
    return code


def _replay(replay: Replay) -> tuple[int, bool]:
    """Train and compare. Returns the exit code, and whether to keep the folder."""
    args, step = replay.args, replay.step
    row = replay.run.rows.get(step, {})
    phase = row.get("phase", replay.run.start_of(step).get("phase"))
    spec = folder_of_phase(args.run_folder, phase if isinstance(phase, int) else None) / FILES[0]
    if code := call(["compiler.cli.main", "compile", str(spec), "-o", str(replay.out / "build")], quiet=True):
        return code, False
    _say_other_build(replay)
    trainings = list[RecordedTraining]()
    for name, slots in (("swapped", args.swap), (TRAINED, ON_THEIRS)) if args.swap else ((TRAINED, "any"),):
        code, training = _train(replay, name, slots)
        if training is None:
            return code, code in (1, 3)
        trainings.insert(0, training)
    if args.swap and (third := third_slots(args.swap, trainings)):
        code, training = _train(replay, "third", third)
        if training is None:
            return code, code in (1, 3)
        trainings.append(training)
    return _report(replay, trainings)


def _train(replay: Replay, name: str, slots: str) -> tuple[int, RecordedTraining | None]:
    """Train up to the step, with ranks on the devices of `slots`. Returns the exit code, and the training if it
    succeeds."""
    args, folder = replay.args, replay.out / name
    try:
        _prepare(args.run_folder, replay.step, folder, _earlier_rollbacks(replay))
    except (CheckpointError, OSError) as error:
        return report_error(printable(str(error)), output_format=args.format), None
    say(f"training step {replay.step} again{_placement_text(slots)}")
    words = ["--out", str(folder), "--data", str(args.data), "--steps", str(replay.step), "--resume"]
    words += ["--device", replay.device, "--replay", slots]
    code = call(["runtime.run.train", str(replay.out / "build"), *words], quiet=args.format == "json")
    if code:
        return code, None
    try:
        return 0, RecordedTraining.read(folder)
    except TextFileError as error:
        return report_error(printable(str(error)), output_format=args.format), None


def _placement_text(slots: str) -> str:
    if slots == "any":
        return ""
    if "," in slots:
        return f", {_exchange_text(slots)}"
    return (
        ", each rank on its own device" if slots == ON_THEIRS else f", each rank on the device {slots[1:]} further on"
    )


def _exchange_text(slots: str) -> str:
    return f"with the devices of ranks {slots.replace(',', ' and ')} exchanged"


def third_slots(swap: str, trainings: Sequence[RecordedTraining]) -> str | None:
    """The slots of a third training, in which the rank that differed runs on a third device.

    None if there is no third device, or if the two trainings (the first on the devices of the run) already single out
    the suspect.
    """
    suspected = suspects(trainings)
    if len(suspected) < 2:
        return None
    devices = {rank: log.device for rank, log in trainings[0].logs.items()}
    world = len(devices)
    if swap == ALL:
        moves = [(devices[rank], devices[(rank + 1) % world], devices[(rank + 2) % world]) for rank in devices]
        if all(len({*move}) == 3 for move in moves):
            return "+2"
    rank, used = suspected[0].rank, {suspect.device for suspect in suspected}
    thirds = [third for third, device in devices.items() if device not in used]
    cores = len(os.sched_getaffinity(0)) if devices[rank][1].startswith("core ") else 0
    thirds += [number for number in range(world, cores) if number != max(_numbers(swap))]  # cores that no rank uses
    return f"{rank},{thirds[0]}" if thirds else None


def _numbers(slots: str) -> list[int]:
    return [int(number) for number in re.findall("[0-9]+", slots)]


# ---------------------------------------------------------------- the start of a training


def _earlier_rollbacks(replay: Replay) -> int | None:
    """The number of rollbacks that the run did before the one at this step; None if it did not roll back there."""
    rows = [row.get("step") for row in _health(replay.args.run_folder).get("rollbacks", ())]
    return len(rows) - 1 - rows[::-1].index(replay.step) if replay.step in rows else None


def _health(run: Path) -> dict[str, Any]:
    try:
        health = json_of(read_text(run / HEALTH, MAX_HEALTH_BYTES), HEALTH)
    except TextFileError:
        return {}
    rows = health.get("rollbacks") if isinstance(health, dict) else None
    return health if isinstance(rows, list) and all(isinstance(row, dict) for row in rows) else {}


def _prepare(run: Path, step: int, folder: Path, rollbacks: int | None) -> None:
    """Fill a run folder so that training up to the step can resume. `rollbacks`: how many the run had done by then.

    Checkpoints and data are linked, as nothing changes their files. All checkpoints before the step are linked, in case
    the last one is damaged; if links are not possible, only the last one is copied.
    """
    folder.mkdir()
    checkpoints = [(path, manifest) for path, manifest in manifests(run / CHECKPOINTS).valid if manifest.step < step]
    if rollbacks is not None:
        checkpoints = [(path, manifest) for path, manifest in checkpoints if _num_rollbacks(manifest) <= rollbacks]
    checkpoints.sort(key=lambda checkpoint: -checkpoint[1].step)
    links = run.stat().st_dev == folder.stat().st_dev
    for path, _ in checkpoints if links else checkpoints[:1]:
        _link(path, folder / CHECKPOINTS / path.name)
    if health := _health(run):  # which samples were skipped
        rows = {**health, "rollbacks": health["rollbacks"][:rollbacks]}
        (folder / HEALTH).write_text(json.dumps(rows) + "\n", "utf-8")
    if (run / DATA).is_dir():
        _link(run / DATA, folder / DATA)


def _num_rollbacks(manifest: Manifest) -> int:
    """The number of rollbacks that a run had done when it wrote a checkpoint."""
    health = manifest.meta.get("health")
    rollbacks = health.get("rollbacks", 0) if isinstance(health, dict) else 0
    return rollbacks if type(rollbacks) is int else 0


def _link(source: Path, target: Path) -> None:
    """Link the files of a folder into another, without hidden ones; copy them if they cannot be linked."""

    def link(file: str, link_path: str) -> None:
        try:
            os.link(file, link_path)
        except OSError:
            shutil.copyfile(file, link_path)

    shutil.copytree(source, target, copy_function=link, ignore=shutil.ignore_patterns(".*"))


# ---------------------------------------------------------------- the report


def _say_other_build(replay: Replay) -> None:
    trained, replayed = replay.run.start_of(replay.step).get("build"), read(replay.out / "build").digest
    if trained not in (None, replayed):
        say(f"the run trained step {replay.step} with build {trained}, and this is {replayed}: rounding may differ")


def other_surroundings(run: RecordedTraining, replayed: RecordedTraining, step: int) -> list[str]:
    """The differences between run and replay that can change bits: build, versions, device, ranks."""
    run_start, replay_start = run.start_of(step), replayed.start_of(step)
    shared = [name for name in SURROUNDINGS if name in run_start and name in replay_start]
    return [
        f"{name}: {run_start[name]} in the run, {replay_start[name]} now"
        for name in shared
        if run_start[name] != replay_start[name]
    ]


def _report(replay: Replay, trainings: Sequence[RecordedTraining]) -> tuple[int, bool]:
    """Write and print the comparison. Returns the exit code, and whether it is not 0."""
    args, step, first = replay.args, replay.step, trainings[0]
    differing, ranks = compare_steps(replay.run, first, step)
    surroundings = other_surroundings(replay.run, first, step)
    outcome, suspected = None, list[Suspect]()
    if args.swap:
        outcome, suspected = verdict(replay.run, trainings, step, comparable=not surroundings)
    document = {
        "version": JSON_VERSION,
        "from_step": first.begun,
        "step": step,
        "equal": not differing and not ranks,
        "differs": differing,
        "ranks": ranks,
        "surroundings": surroundings,
        "verdict": outcome,
        "suspects": [_as_json(suspect) for suspect in suspected],
        "faults": [row["reason"] for row in replay.run.events if row.get("event") == "fault" and row["step"] == step],
    }
    write(replay.out / SHOWN, json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2) if args.format == "json" else text(document, args.swap))
    code = EXIT_OF[outcome] if outcome else 0 if document["equal"] else EXIT_DIFFERS
    return code, bool(code)


def _as_json(suspect: Suspect) -> dict[str, Any]:
    host, device = suspect.device
    return {
        "rank": suspect.run_rank,
        "host": host,
        "device": device,
        "as": suspect.rank,
        "step": suspect.step,
        "first": suspect.output,
    }


def text(document: Mapping[str, Any], swap: str | None) -> str:
    """The comparison as text."""
    begun, step = document["from_step"], document["step"]
    steps = f"step {step}" if begun + 1 == step else f"steps {begun + 1} to {step}"
    if document["differs"]:
        first = document["differs"][0]
        lines = [f"{steps}: the first difference is in step {first['step']}"]
        lines += [
            f"  {key}: {values['run']!r} in the run, {values['replay']!r} now" for key, values in first["keys"].items()
        ]
    else:
        lines = [f"{steps}: equal to the run, bit for bit"]
    if document["ranks"]:
        lines.append(f"  losses, loads or gradients differ from the run: rank {', '.join(map(str, document['ranks']))}")
    lines += [f"  {difference}" for difference in document["surroundings"]]
    lines += [f"the run computed this step again because of {fault}: a transient error" for fault in document["faults"]]
    if outcome := document["verdict"]:
        lines += _verdict_lines(outcome, document["suspects"], swap or "", comparable=not document["surroundings"])
    return "\n".join(map(printable, lines))


def _verdict_lines(
    outcome: Verdict, suspected: Sequence[Mapping[str, Any]], swap: str, *, comparable: bool
) -> list[str]:
    swapped = "with each rank on the device of another" if swap == ALL else _exchange_text(swap)
    if outcome == "real":
        return [f"verdict: real: the same bits {swapped}, so the number comes from the weights and the data"]
    if outcome == "transient":
        return [f"verdict: transient: not reproduced on the devices of the run, nor {swapped}"]
    if outcome == "unknown":
        cause = "no two trainings agree" if comparable else "the run cannot be compared, and no device differs now"
        return [f"verdict: unknown: {cause}"]
    names = [f"{suspect['device']} of {suspect['host']}{_rank_suffix(suspect['rank'])}" for suspect in suspected]
    first = suspected[0]
    lines = [f"verdict: device: {' or '.join(names)} computes other bits from the same inputs than another device"]
    lines += [f"  first as rank {first['as']}, in {first['first']!r} of step {first['step']}"]
    lines += ["  these trainings do not tell which: that needs a third device"] * (len(suspected) > 1)
    return lines


def _rank_suffix(rank: int | None) -> str:
    return "" if rank is None else f" (rank {rank})"
