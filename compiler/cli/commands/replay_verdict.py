"""What the trainings of a replay say together: a number is real, or an error passed, or a device is suspect.

A step is a function of weights and samples. So trainings of it that differ show an error of a device, and a rank that
made something else of the same numbers names it: it computed on another device in each training. Files are those that
runtime/run/witness.py writes.
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
from compiler.tools.report.run_page import step_rows

METRICS, EVENTS, WITNESS = "metrics.jsonl", "events.jsonl", "witness"
# What differs between two trainings of one step, and what only a last step or a due one has.
MEASURED = frozenset({"time", "tokens_per_s", "step_s", "spent_s", "spent_most_s", "slowest_rank"}) | {
    "memory_bytes",
    "process_bytes",
}
AT_THE_END = ("validation_",)
DIGITS = 16  # of a fingerprint
Verdict = Literal["real", "transient", "device", "unknown"]
Device = tuple[str, str]  # host, name


@dataclass(frozen=True)
class ComputedStep:
    """A computation of a step on a rank: fingerprints of what it got and gave, by their names."""

    step: int
    last_sample: int
    numbers: str
    names: tuple[str, ...]
    prints: str
    not_finite: frozenset[int]

    def print_at(self, at: int) -> str:
        """A fingerprint; "" behind the last one."""
        return self.prints[DIGITS * at : DIGITS * (at + 1)]

    def is_given(self, at: int) -> bool:
        """Whether the rank made something, and did not get it."""
        return at < len(self.names) and self.names[at].startswith(">")


@dataclass(frozen=True)
class ComputedLog:
    """What a rank computed, and where."""

    device: Device
    computed: tuple[ComputedStep, ...]


@dataclass(frozen=True)
class RecordedTraining:
    """What a run, or a training of its steps again, left in its folder. `rows`: by step."""

    rows: Mapping[int, Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    logs: Mapping[int, ComputedLog] = field(default_factory=dict)

    @staticmethod
    def read(run: Path) -> RecordedTraining:
        """TextFileError where a file is missing or damaged, but for the events of a run."""
        try:
            events = step_rows(run / EVENTS)[0]
        except TextFileError:
            events = ()
        there = (run / METRICS).exists() or not (run / WITNESS).is_dir()  # a first step that is bad leaves no row
        rows = {row["step"]: row for row in step_rows(run / METRICS)[0]} if there else {}
        return RecordedTraining(rows, events, dict(_logs(run / WITNESS)))

    @cached_property
    def bad(self) -> dict[tuple[int, int], Mapping[str, Any]]:
        """The bad steps, by their number and their last sample."""
        rows = [row for row in self.events if row.get("event") == "bad_step"]
        return {(row["step"], row["samples"][1]): row for row in rows}

    def start_of(self, step: int) -> Mapping[str, Any]:
        """The event of the start that trained a step last; empty where events do not say."""
        starts = [row for row in self.events if row.get("event") == "start" and row["step"] < step]
        return starts[-1] if starts else {}

    @property
    def begun(self) -> int:
        """The step behind which it went on, 0 where it began."""
        return next((row["step"] for row in self.events if row.get("event") == "resume"), 0)

    def computed(self, step: int) -> dict[int, ComputedStep]:
        """What each rank computed of a step last."""
        return {
            rank: found[-1]
            for rank, log in self.logs.items()
            if (found := [each for each in log.computed if each.step == step])
        }


def _logs(folder: Path) -> Iterator[tuple[int, ComputedLog]]:
    for path in sorted(folder.glob("rank_*.jsonl")):
        first, *lines = path.read_text("utf-8").splitlines()
        head, names, found = json.loads(first), (), list[ComputedStep]()
        for row in map(json.loads, lines):
            names = names if row["names"] is None else tuple(row["names"])
            not_finite = frozenset(row["not_finite"])
            found.append(
                ComputedStep(row["step"], row["last_sample"], row["numbers"], names, row["prints"], not_finite)
            )
        yield head["rank"], ComputedLog((head["host"], head["device"]), tuple(found))


# ---------------------------------------------------------------- the run and a replay


def differences(step: int, was: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What differs between the rows of a step, by key; None if nothing does, or if the run has no row of the step."""
    if was is None:
        return None
    if now is None:
        return {"step": step, "keys": {"step": {"run": step, "replay": None}}}
    keys = {key for key in was.keys() & now.keys() if key not in MEASURED}
    keys |= {key for key in was.keys() ^ now.keys() if key not in MEASURED and not key.startswith(AT_THE_END)}
    found = {key: {"run": was.get(key), "replay": now.get(key)} for key in sorted(keys) if was.get(key) != now.get(key)}
    return {"step": step, "keys": found} if found else None


def compared(run: RecordedTraining, again: RecordedTraining, step: int) -> tuple[list[dict[str, Any]], list[int]]:
    """The steps up to this one that differ between the run and a training again, and what does; and the ranks whose
    numbers differ, as far as the run has those of ranks."""
    last = next((each.last_sample for each in again.computed(step).values()), -1)
    bad = run.bad.get((step, last))
    end = step if bad is None else min(step, (step if bad.get("to") is None else bad["to"] + 1))
    rows = [(at, run.rows.get(at), again.rows.get(at)) for at in range(again.begun + 1, end)]
    if bad is None:
        rows.append((step, run.rows.get(step), again.rows.get(step)))
    else:
        rows.append((step, _numbers(bad), _numbers(again.bad.get((step, last)) or again.rows.get(step))))
    found = [differs for each in rows if (differs := differences(*each))]
    prints = (bad or {}).get("prints") or ()
    numbers = {rank: each.numbers for rank, each in again.computed(step).items()}
    return found, [rank for rank, was in enumerate(prints) if numbers.get(rank) not in (None, was)]


def _numbers(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else {name: row.get(name) for name in ("loss", "grad_norm")}


# ---------------------------------------------------------------- trainings on several devices


@dataclass(frozen=True)
class Suspect:
    """A device that made something else than another of the same numbers: first as `rank`, in `what` of a step. `of`:
    the rank that computes there in the run, None if none does."""

    of: int | None
    device: Device
    rank: int
    step: int
    what: str


def are_equal(one: RecordedTraining, other: RecordedTraining) -> bool:
    """Whether two trainings have the same numbers on every rank."""
    return {rank: log.computed for rank, log in one.logs.items()} == {
        rank: log.computed for rank, log in other.logs.items()
    }


def suspects(trainings: Sequence[RecordedTraining]) -> list[Suspect]:
    """The devices that may have computed wrongly in trainings that differ in where ranks compute, the first of them
    that of the run. Several if the trainings do not tell which.

    Each set of trainings in which a rank made something else of the same numbers gives devices, the wrong one among
    them.
    """
    groups = [group for size in range(2, len(trainings) + 1) for group in combinations(trainings, size)]
    found = [each for group in groups for rank in group[0].logs if (each := _odd(rank, [t.logs[rank] for t in group]))]
    if not found:
        return []
    devices = set.intersection(*({*each} for each in found)) or set.union(*({*each} for each in found))
    ranks = {log.device: rank for rank, log in sorted(trainings[0].logs.items(), reverse=True)}
    first = {device: next(each[device] for each in found if device in each) for device in devices}
    listed = [Suspect(ranks.get(device), device, *first[device]) for device in devices]
    return sorted(listed, key=lambda each: (each.of is None, each.of or 0, each.device))


def _odd(rank: int, logs: Sequence[ComputedLog]) -> dict[Device, tuple[int, int, str]]:
    """The devices that may have made something else, as this rank, of the same numbers: each with the rank, the step
    and what it made. None if the rank first got something else."""
    if (found := _first_difference([log.computed for log in logs])) is None:
        return {}
    number, at = found
    steps = [log.computed[number] for log in logs]
    if not steps[0].is_given(at):
        return {}
    made = [(log.device, step.print_at(at), at in step.not_finite) for log, step in zip(logs, steps, strict=True)]
    return dict.fromkeys(_unusual(made), (rank, steps[0].step, steps[0].names[at].removeprefix("> ")))


def _first_difference(logs: Sequence[Sequence[ComputedStep]]) -> tuple[int, int] | None:
    """The first computation, and the first place in it, where the trainings of a rank do not all have the same."""
    for number, steps in enumerate(zip(*logs, strict=False)):
        if all(each == steps[0] for each in steps):
            continue
        for at in range(max(len(each.names) for each in steps)):
            if len({(each.names[at : at + 1], each.print_at(at)) for each in steps}) > 1:
                return number, at
    return None


def _unusual(made: Sequence[tuple[Device, str, bool]]) -> set[Device]:
    """The devices that made something else than most, or not the same each time; if there is no most, those that made
    something that is not finite where others did not; or else all. `made`: device, fingerprint, whether not finite."""
    by_device = dict[Device, set[str]]()
    for device, each, _ in made:
        by_device.setdefault(device, set()).add(each)
    if unsteady := {device for device, prints in by_device.items() if len(prints) > 1}:
        return unsteady
    (usual, count), *_ = Counter(each for prints in by_device.values() for each in prints).most_common()
    if 2 * count > len(by_device):
        return {device for device, prints in by_device.items() if usual not in prints}
    wild = {device for device, _, is_wild in made if is_wild}
    return wild if 0 < len(wild) < len(by_device) else {*by_device}


def verdict(
    run: RecordedTraining, trainings: Sequence[RecordedTraining], step: int, *, comparable: bool
) -> tuple[Verdict, list[Suspect]]:
    """What a number of the run is. `trainings`: those again, the first on the devices of the run; `comparable`: whether
    they have build and versions of the run."""
    again, swapped, *_ = trainings
    as_run, swapped_as_run = (not any(compared(run, each, step)) for each in (again, swapped))
    if are_equal(again, swapped):
        return ("real" if as_run else "transient" if comparable else "unknown"), []
    if comparable and swapped_as_run and not as_run:
        return "transient", []
    found = suspects(trainings)
    if found and (as_run or not comparable or len(found) == 1):
        return "device", found
    return "unknown", found
