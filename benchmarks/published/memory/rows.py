"""Published peaks of memory and their plans, from runs.json and results.json in this folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.published.memory.stacks import DIFFERENCES
from compiler.plan.read_files import with_files
from compiler.predict.predict import memories, predict_timed_plan, time_plan
from dsl.load import resolve

FOLDER = Path(__file__).parent
RUNS, RESULTS = FOLDER / "runs.json", FOLDER / "results.json"
GIB = 2**30


Measure = Literal["allocated", "reserved", "device"]  # bytes of tensors; with gaps between them; all of a device


@dataclass(frozen=True, slots=True)
class PublishedPeak:
    """A run with a published peak: its spec with overrides, and the GiB of a device."""

    name: str
    config: str
    gib: float
    set: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PeakGroup:
    """Published peaks from one source.

    `rank`: the pipeline rank whose peak is published, -1 for the last, None for the fullest. `differences`: names in
    `DIFFERENCES`.
    """

    title: str
    source: str
    measure: Measure
    spec: str  # a file in this folder
    runs: tuple[PublishedPeak, ...]
    rank: int | None = None
    differences: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class PlannedPeak:
    """The plan of a run, in GiB."""

    tensors: float  # of the plan; if all of a device is published, the middle of the plan's interval
    differences: float  # that the run's trainer holds besides
    error: float = 0.0  # half the width of the interval

    def off(self, run: PublishedPeak) -> float:
        """The relative error of the planned peak; positive: more than published."""
        return (self.tensors + self.differences) / run.gib - 1

    def is_hit(self, run: PublishedPeak) -> bool:
        """Whether the published bytes, which are whole GiB, lie inside the interval."""
        return abs(self.tensors + self.differences - run.gib) <= self.error + 0.5


@dataclass(frozen=True, slots=True)
class PeakSummary:
    """Relative errors of planned peaks."""

    runs: int
    median_error: float
    of_specs_alone: float  # the median error of the runs that a spec says in full
    worst: tuple[str, float]
    devices: int  # runs with all of a device
    inside: int  # of these, inside the interval


def groups() -> tuple[PeakGroup, ...]:
    """All published peaks."""
    return tuple(_group(**group) for group in json.loads(RUNS.read_text("utf-8")))


def _group(runs: Sequence[Mapping[str, Any]], **facts: Any) -> PeakGroup:
    peaks = tuple(PublishedPeak(**{**run, "set": tuple(run.get("set", ()))}) for run in runs)
    return PeakGroup(runs=peaks, **{**facts, "differences": tuple(facts.get("differences", ()))})


def all_peaks() -> Iterator[tuple[PeakGroup, PublishedPeak]]:
    """The runs of all groups."""
    for group in groups():
        yield from ((group, run) for run in group.runs)


def planned(group: PeakGroup, run: PublishedPeak) -> PlannedPeak:
    """Plan a run as `dsc plan` does."""
    resolved = resolve(FOLDER / group.spec, overrides=run.set)
    spec = with_files(resolved.spec, resolved.origins, FOLDER)
    timed = time_plan(spec)
    ranks = memories(timed)
    memory = max(ranks, key=lambda rank: rank.peak_bytes) if group.rank is None else ranks[group.rank]
    besides = round(sum(DIFFERENCES[name].bytes(spec, memory) for name in group.differences) / GIB, 2)
    if group.measure != "device":
        return PlannedPeak(round(memory.peak_bytes / GIB, 2), besides)
    device = predict_timed_plan(timed, ranks).devices_memory[memory.pp_rank]
    return PlannedPeak(round(device.expected_bytes / GIB, 2), besides, round(device.error_bytes / GIB, 2))


def stored() -> dict[str, PlannedPeak]:
    """The plans in results.json, by name of the run."""
    return {name: PlannedPeak(**row) for name, row in json.loads(RESULTS.read_text("utf-8")).items()}


def store(results: Mapping[str, PlannedPeak]) -> None:
    """Write results.json, one run per line."""
    lines = (f"  {json.dumps(run.name)}: {json.dumps(asdict(results[run.name]))}" for _, run in all_peaks())
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def summary(results: Mapping[str, PlannedPeak]) -> PeakSummary:
    """The summary of all runs."""
    off = {run.name: results[run.name].off(run) for _, run in all_peaks()}
    alone = [abs(off[run.name]) for group, run in all_peaks() if not group.differences]
    worst = max(off, key=lambda name: abs(off[name]))
    hits = [results[run.name].is_hit(run) for group, run in all_peaks() if group.measure == "device"]
    return PeakSummary(
        len(off), median(map(abs, off.values())), median(alone), (worst, off[worst]), len(hits), sum(hits)
    )
