"""Runs beside each other, as plain values: what each came to, and in what their specs differ. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.tools.difference import difference
from compiler.tools.report.charts import Points, column
from compiler.tools.report.lost_time import LostTime, lost_time
from compiler.tools.report.run_page import Rows, events_of, replaced_rows, step_rows
from dsl.load import Resolved, resolve
from dsl.messages.diagnostics import SpecError

LAST_STEPS = 10  # a training loss is the mean of this many steps: one step is noise
ABSENT = "—"


@dataclass(frozen=True)
class Run:
    """A run folder: the rows of its metrics, where its time went, and its spec, None where that cannot be read."""

    name: str  # the end of its path that no other run has
    folder: Path
    metrics: Rows
    damaged: int  # lines of metrics.jsonl that are none
    lost: LostTime | None
    spec: Resolved | None


@dataclass(frozen=True)
class Figures:
    """What a run came to; None where its rows do not say it. Losses in nats a token, times in seconds."""

    steps: int
    tokens: int | None
    loss: float | None  # of the main head, the mean of the last steps
    loss_at: float | None  # the mean of the last steps up to the tokens that all runs have seen
    validation_loss: float | None
    tokens_per_s: float | None  # median
    trained_s: float  # of the steps that stay
    goodput: float | None


@dataclass(frozen=True)
class Difference:
    """A key that not all specs have alike: its value in each run, ABSENT where there is none."""

    path: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Compared:
    """Runs, what each came to, the tokens that all have seen (None where one says none), and their specs' differences;
    `unread` names the runs without a readable spec."""

    runs: tuple[Run, ...]
    figures: tuple[Figures, ...]
    common_tokens: int | None
    differences: tuple[Difference, ...]
    unread: tuple[str, ...]


def read_run(folder: Path, name: str) -> Run:
    """What a run folder left. TextFileError where it has no readable metrics.jsonl, ValueError where
    that has no step."""
    metrics, damaged = step_rows(folder / "metrics.jsonl")
    if not metrics:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no step")
    events = events_of(folder)
    try:
        spec = resolve(str(folder / "spec.resolved"))
    except (OSError, ValueError, SpecError):
        spec = None
    lost = lost_time(metrics, replaced_rows(folder), events) if events else None
    return Run(name, folder, metrics, damaged, lost, spec)


def compare(runs: Sequence[Run]) -> Compared:
    """Runs beside each other. Pure."""
    seen = [_last(column(run.metrics, "tokens")) for run in runs]
    common = min(int(each) for each in seen if each is not None) if None not in seen else None
    return Compared(
        runs=tuple(runs),
        figures=tuple(_figures(run, common) for run in runs),
        common_tokens=common,
        differences=_differences(runs),
        unread=tuple(run.name for run in runs if run.spec is None),
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """The shortest end of each path that names it alone among `folders`, which differ."""
    parts = [folder.absolute().parts for folder in folders]
    return [
        next(
            "/".join(mine[-size:])
            for size in range(1, len(mine) + 1)
            if sum(other[-size:] == mine[-size:] for other in parts) == 1 or size == len(mine)
        )
        for mine in parts
    ]


def over(metrics: Sequence[Mapping[str, Any]], key: str, axis: str) -> Points:
    """The values of `key` over the tokens seen (`axis` "tokens"), or over the seconds trained ("time")."""
    found, seconds = [], 0.0
    for row in metrics:
        step_s = row.get("step_s")
        seconds += step_s if isinstance(step_s, int | float) and 0 < step_s < 1e9 else 0.0
        found.append({**row, "step": row.get("tokens") if axis == "tokens" else seconds})
    return column(found, key)


def _figures(run: Run, common_tokens: int | None) -> Figures:
    tokens, speed = column(run.metrics, "tokens"), column(run.metrics, "tokens_per_s")
    steps = {step for step, seen in tokens if common_tokens is not None and seen <= common_tokens}
    until = [row for row in run.metrics if row["step"] in steps]
    last = _last(tokens)
    return Figures(
        steps=run.metrics[-1]["step"],
        tokens=None if last is None else int(last),
        loss=_mean(column(run.metrics, "loss")),
        loss_at=_mean(column(until, "loss")),
        validation_loss=_last(column(run.metrics, "validation_loss")),
        tokens_per_s=statistics.median(value for _, value in speed) if speed else None,
        trained_s=over([*run.metrics, {"x": 0}], "x", "time")[-1][0],
        goodput=run.lost.goodput if run.lost else None,
    )


def _last(points: Points) -> float | None:
    return points[-1][1] if points else None


def _mean(points: Points) -> float | None:
    return statistics.fmean(value for _, value in points[-LAST_STEPS:]) if points else None


def _differences(runs: Sequence[Run]) -> tuple[Difference, ...]:
    """Keys in which any run differs from the first that has a spec, in the order of the schema."""
    read = [(i, run.spec) for i, run in enumerate(runs) if run.spec is not None]
    if len(read) < 2:
        return ()
    first = read[0][1]
    changes = {i: {change.path: change for change in difference(first, spec).values} for i, spec in read[1:]}
    paths = dict.fromkeys(path for each in changes.values() for path in each)
    found = []
    for path in paths:
        base = next(each[path].before for each in changes.values() if path in each) or ABSENT
        values = [ABSENT] * len(runs)
        for i, _ in read:
            change = changes.get(i, {}).get(path)
            values[i] = base if change is None else change.after or ABSENT
        found.append(Difference(path, tuple(values)))
    return tuple(found)
