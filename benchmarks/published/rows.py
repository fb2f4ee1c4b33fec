"""Published runs and their predictions, from runs.json and results.json in this folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from compiler.predict.predict import interval_of_plan, time_plan
from compiler.predict.rank_use import use_of
from dsl.load import resolve

FOLDER = Path(__file__).parent
RUNS, RESULTS = FOLDER / "runs.json", FOLDER / "results.json"
FIGURES = 4  # significant figures of stored numbers


@dataclass(frozen=True, slots=True)
class Published:
    """A published run: its spec with overrides, and the measured tokens per second and device."""

    name: str
    config: str
    spec: str  # a file in this folder and its run, such as `zero-bubble.dsc:small`
    tokens_per_s_gpu: float
    set: tuple[str, ...] = ()

    @property
    def is_searched(self) -> bool:
        """Whether the schedule is searched for, which takes minutes."""
        return "schedule.name=auto" in self.set


@dataclass(frozen=True, slots=True)
class Group:
    """Published runs from one source. `differs`: how they differ from their specs."""

    title: str
    source: str
    differs: str
    runs: tuple[Published, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """The prediction of a run."""

    step_s: float
    low_s: float  # the interval around it
    high_s: float
    tokens_gpu: float  # tokens per step and device
    rates: str  # the table of rates

    def off(self, run: Published) -> float:
        """The relative error of the predicted tokens per second; positive: faster than published."""
        return self.tokens_gpu / self.step_s / run.tokens_per_s_gpu - 1

    def published_s(self, run: Published) -> float:
        """Seconds of the published step."""
        return self.tokens_gpu / run.tokens_per_s_gpu

    def is_hit(self, run: Published) -> bool:
        """Whether the published step lies inside the interval."""
        return self.low_s <= self.published_s(run) <= self.high_s


@dataclass(frozen=True, slots=True)
class Summary:
    """Relative errors of predicted tokens per second; positive: faster than published."""

    runs: int
    bias: float  # the median of signed errors
    worst: tuple[str, float]
    inside: float  # the share of published steps inside the interval


def groups() -> tuple[Group, ...]:
    """All published runs."""
    return tuple(
        Group(
            **{**group, "runs": tuple(Published(**{**run, "set": tuple(run.get("set", ()))}) for run in group["runs"])}
        )
        for group in json.loads(RUNS.read_text("utf-8"))
    )


def all_runs() -> Iterator[Published]:
    """The runs of all groups."""
    for group in groups():
        yield from group.runs


def predicted(run: Published) -> Result:
    """Predict a run with the rates that `dsc plan` chooses by default."""
    timed_plan = time_plan(resolve(FOLDER / run.spec, overrides=run.set).spec)
    step, interval = timed_plan.step, interval_of_plan(timed_plan, use_of(timed_plan))
    assert interval is not None
    return Result(
        step_s=_rounded(step.seconds),
        low_s=_rounded(interval.low_s),
        high_s=_rounded(interval.high_s),
        tokens_gpu=_rounded(step.tokens / timed_plan.plan.mesh.world),
        rates=timed_plan.rates[0].table,
    )


def _rounded(figure: float) -> float:
    return float(f"{figure:.{FIGURES}g}")


def stored() -> dict[str, Result]:
    """The predictions in results.json, by name of the run."""
    return {name: Result(**row) for name, row in json.loads(RESULTS.read_text("utf-8")).items()}


def store(results: Mapping[str, Result]) -> None:
    """Write results.json, one run per line."""
    order = [run.name for run in all_runs() if run.name in results]
    lines = (f"  {json.dumps(name)}: {json.dumps(asdict(results[name]))}" for name in order)
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def summary(runs: Sequence[Published], results: Mapping[str, Result]) -> Summary:
    """The summary of all runs."""
    off = {run.name: results[run.name].off(run) for run in runs}
    worst = max(off, key=lambda name: abs(off[name]))
    hits = sum(results[run.name].is_hit(run) for run in runs)
    return Summary(len(runs), median(off.values()), (worst, off[worst]), hits / len(runs))


def reasons() -> dict[str, Any]:
    """The reasons of large errors, by prefix of the names of runs, from reasons.json."""
    return dict(json.loads((FOLDER / "reasons.json").read_text("utf-8")))
