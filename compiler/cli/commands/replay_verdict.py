"""The verdict of a replay: a number is real, an error was transient, or a device is suspect.

A step is a function of weights and samples, so trainings of it that differ show a device error. Each rank ran on
another device in each training: the first rank whose outputs differ for equal inputs shows which devices are suspect.
The files are written by runtime/run/witness.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from compiler.files.text import TextFileError
from compiler.tools.report.long_metrics import step_rows

METRICS, EVENTS, WITNESS = "metrics.jsonl", "events.jsonl", "witness"
# Keys of a metrics row that always differ between trainings, and prefixes of keys that only some steps have.
MEASURED = frozenset({"time", "tokens_per_s", "step_s", "spent_s", "spent_most_s", "slowest_rank"}) | {
    "memory_bytes",
    "reserved_bytes",
    "process_bytes",
    "straggler",
    "straggler_factor",
}
AT_THE_END = ("validation_",)
DIGITS = 16  # characters of a fingerprint
Verdict = Literal["real", "transient", "device", "unknown"]
Device = tuple[str, str]  # host, name


@dataclass(frozen=True)
class ComputedStep:
    """One computation of a step on a rank: named fingerprints of its inputs and outputs."""

    step: int
    last_sample: int
    numbers: str
    names: tuple[str, ...]
    prints: str
    not_finite: frozenset[int]

    def print_at(self, index: int) -> str:
        """The fingerprint at an index; "" past the end."""
        return self.prints[DIGITS * index : DIGITS * (index + 1)]

    def is_output(self, index: int) -> bool:
        """Whether the value at an index is an output of the rank, not an input."""
        return index < len(self.names) and self.names[index].startswith(">")


@dataclass(frozen=True)
class ComputedLog:
    """The computations of a rank, and its device."""

    device: Device
    computed: tuple[ComputedStep, ...]


@dataclass(frozen=True)
class RecordedTraining:
    """The records in the folder of a run or a replay. `rows`: metrics by step. `logs`: by rank."""

    rows: Mapping[int, Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    logs: Mapping[int, ComputedLog] = field(default_factory=dict)

    @staticmethod
    def read(run: Path) -> RecordedTraining:
        """Read a run folder. Raises TextFileError if a file is missing or damaged, except the events."""
        try:
            events = step_rows(run / EVENTS).rows
        except TextFileError:
            events = ()
        has_rows = (run / METRICS).exists() or not (run / WITNESS).is_dir()  # a bad first step leaves no row
        rows = {row["step"]: row for row in step_rows(run / METRICS).rows} if has_rows else {}
        return RecordedTraining(rows, events, dict(_logs(run / WITNESS)))

    @cached_property
    def bad(self) -> dict[tuple[int, int], Mapping[str, Any]]:
        """Events of bad steps, by (step, last sample)."""
        rows = [row for row in self.events if row.get("event") == "bad_step"]
        return {(row["step"], row["samples"][1]): row for row in rows}

    def start_of(self, step: int) -> Mapping[str, Any]:
        """The event of the last start before a step; empty if unknown."""
        starts = [row for row in self.events if row.get("event") == "start" and row["step"] < step]
        return starts[-1] if starts else {}

    @property
    def begun(self) -> int:
        """The step from which the training resumed; 0 if it started afresh."""
        return next((row["step"] for row in self.events if row.get("event") == "resume"), 0)

    def last_computations(self, step: int) -> dict[int, ComputedStep]:
        """The last computation of a step on each rank."""
        return {
            rank: steps[-1]
            for rank, log in self.logs.items()
            if (steps := [computation for computation in log.computed if computation.step == step])
        }


def _logs(folder: Path) -> Iterator[tuple[int, ComputedLog]]:
    for path in sorted(folder.glob("rank_*.jsonl")):
        first, *lines = path.read_text("utf-8").splitlines()
        head, names, computed = json.loads(first), (), list[ComputedStep]()
        for row in map(json.loads, lines):
            names = names if row["names"] is None else tuple(row["names"])
            not_finite = frozenset(row["not_finite"])
            computed.append(
                ComputedStep(row["step"], row["last_sample"], row["numbers"], names, row["prints"], not_finite)
            )
        yield head["rank"], ComputedLog((head["host"], head["device"]), tuple(computed))


# ---------------------------------------------------------------- the run and a replay


def differences(
    step: int, run_row: Mapping[str, Any] | None, replay_row: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The differences between two rows of a step, by key. None if nothing differs, or if the run has no row."""
    if run_row is None:
        return None
    if replay_row is None:
        return {"step": step, "keys": {"step": {"run": step, "replay": None}}}
    keys = {key for key in run_row.keys() & replay_row.keys() if key not in MEASURED}
    keys |= {
        key for key in run_row.keys() ^ replay_row.keys() if key not in MEASURED and not key.startswith(AT_THE_END)
    }
    differs = {
        key: {"run": run_row.get(key), "replay": replay_row.get(key)}
        for key in sorted(keys)
        if run_row.get(key) != replay_row.get(key)
    }
    return {"step": step, "keys": differs} if differs else None


def compare_steps(run: RecordedTraining, replay: RecordedTraining, step: int) -> tuple[list[dict[str, Any]], list[int]]:
    """Compare a run and a replay: the steps up to `step` that differ, with their keys, and the ranks whose numbers
    differ (if the run recorded them)."""
    last = next((computation.last_sample for computation in replay.last_computations(step).values()), -1)
    bad = run.bad.get((step, last))
    end = step if bad is None else min(step, (step if bad.get("to") is None else bad["to"] + 1))
    rows = [
        (earlier_step, run.rows.get(earlier_step), replay.rows.get(earlier_step))
        for earlier_step in range(replay.begun + 1, end)
    ]
    if bad is None:
        rows.append((step, run.rows.get(step), replay.rows.get(step)))
    else:
        rows.append((step, _numbers(bad), _numbers(replay.bad.get((step, last)) or replay.rows.get(step))))
    differing = [differs for row in rows if (differs := differences(*row))]
    prints = (bad or {}).get("prints") or ()
    numbers = {rank: computation.numbers for rank, computation in replay.last_computations(step).items()}
    return differing, [rank for rank, recorded in enumerate(prints) if numbers.get(rank) not in (None, recorded)]


def _numbers(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else {name: row.get(name) for name in ("loss", "grad_norm")}


# ---------------------------------------------------------------- trainings on several devices


@dataclass(frozen=True)
class Suspect:
    """A device that computed another output from the same inputs: first as `rank`, in the value `output` of a step.
    `run_rank`: the rank on this device in the run, or None."""

    run_rank: int | None
    device: Device
    rank: int
    step: int
    output: str


def are_equal(first: RecordedTraining, second: RecordedTraining) -> bool:
    """Whether two trainings have equal computations on every rank."""
    return {rank: log.computed for rank, log in first.logs.items()} == {
        rank: log.computed for rank, log in second.logs.items()
    }


def suspects(trainings: Sequence[RecordedTraining]) -> list[Suspect]:
    """The devices that may have computed wrongly, in trainings with ranks on different devices. The first training is
    on the devices of the run. Several devices if the trainings cannot tell which.

    Each group of trainings in which a rank computed other outputs from the same inputs gives a set of devices that
    contains the faulty one.
    """
    groups = [group for size in range(2, len(trainings) + 1) for group in combinations(trainings, size)]
    sets = [odd for group in groups for rank in group[0].logs if (odd := _odd(rank, [t.logs[rank] for t in group]))]
    if not sets:
        return []
    devices = set.intersection(*({*odd} for odd in sets)) or set.union(*({*odd} for odd in sets))
    ranks = {log.device: rank for rank, log in sorted(trainings[0].logs.items(), reverse=True)}
    first = {device: next(odd[device] for odd in sets if device in odd) for device in devices}
    listed = [Suspect(ranks.get(device), device, *first[device]) for device in devices]
    return sorted(listed, key=lambda suspect: (suspect.run_rank is None, suspect.run_rank or 0, suspect.device))


def _odd(rank: int, logs: Sequence[ComputedLog]) -> dict[Device, tuple[int, int, str]]:
    """The devices that, as this rank, may have computed another output from the same inputs: device → (rank, step, name
    of the output). Empty if nothing differs, or if an input differs first."""
    if (place := _first_difference([log.computed for log in logs])) is None:
        return {}
    number, index = place
    steps = [log.computed[number] for log in logs]
    if not steps[0].is_output(index):
        return {}
    outputs = [
        (log.device, step.print_at(index), index in step.not_finite) for log, step in zip(logs, steps, strict=True)
    ]
    return dict.fromkeys(_unusual(outputs), (rank, steps[0].step, steps[0].names[index].removeprefix("> ")))


def _first_difference(logs: Sequence[Sequence[ComputedStep]]) -> tuple[int, int] | None:
    """The first difference between the trainings of a rank: (index of the computation, index of the value in it)."""
    for number, steps in enumerate(zip(*logs, strict=False)):
        if all(computation == steps[0] for computation in steps):
            continue
        for index in range(max(len(computation.names) for computation in steps)):
            if len({(computation.names[index : index + 1], computation.print_at(index)) for computation in steps}) > 1:
                return number, index
    return None


def _unusual(outputs: Sequence[tuple[Device, str, bool]]) -> set[Device]:
    """The suspect devices. `outputs`: (device, fingerprint, whether not finite) of each training.

    These are the devices with several different outputs; else those that differ from a majority; else those with
    non-finite outputs, if others are finite; else all.
    """
    by_device = dict[Device, set[str]]()
    for device, fingerprint, _ in outputs:
        by_device.setdefault(device, set()).add(fingerprint)
    if unsteady := {device for device, prints in by_device.items() if len(prints) > 1}:
        return unsteady
    (usual, count), *_ = Counter(fingerprint for prints in by_device.values() for fingerprint in prints).most_common()
    if 2 * count > len(by_device):
        return {device for device, prints in by_device.items() if usual not in prints}
    not_finite = {device for device, _, is_not_finite in outputs if is_not_finite}
    return not_finite if 0 < len(not_finite) < len(by_device) else {*by_device}


def verdict(
    run: RecordedTraining, trainings: Sequence[RecordedTraining], step: int, *, comparable: bool
) -> tuple[Verdict, list[Suspect]]:
    """The verdict on a number of the run, and the suspect devices. `trainings`: the replays, the first on the devices
    of the run. `comparable`: whether they have the build and versions of the run."""
    replay, swapped, *_ = trainings
    as_run, swapped_as_run = (not any(compare_steps(run, training, step)) for training in (replay, swapped))
    if are_equal(replay, swapped):
        return ("real" if as_run else "transient" if comparable else "unknown"), []
    if comparable and swapped_as_run and not as_run:
        return "transient", []
    suspected = suspects(trainings)
    if suspected and (as_run or not comparable or len(suspected) == 1):
        return "device", suspected
    return "unknown", suspected
