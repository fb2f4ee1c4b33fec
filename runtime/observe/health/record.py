"""health.json of a run: batches that ended it, for `--skip-batch` to leave out, and its rollbacks.

    {"batches": [{"order": {…}, "step": 5, "samples": [32, 39], "reason": "loss nan, …"}],
     "rollbacks": [{"order": {…}, "step": 57, "samples": [288, 455], "to": 36}]}

Samples are numbered in the order of one text and one seed, so batches of another order are not those of this run. A
rollback is written before the run ends by it. From then on the checkpoints behind the step that it goes back to that
do not count it are of a training that was given up: whatever kills the run, the next start goes on from one before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.checkpoint import durable_files as files
from runtime.checkpoint.shard_manifest import CHECKPOINTS, Manifest, manifests
from runtime.data.cuts import Ranges
from runtime.data.position import Position
from runtime.observe.health.judge import BadStepError, Recent
from runtime.system.regular_files import read_bytes

FILE = "health.json"
LATEST = "LATEST"


@dataclass(frozen=True)
class Rollback:
    """At `step` the run went back behind the step `to`, and on without the `samples` [first, end) of an order."""

    order: Mapping[str, Any]
    step: int
    samples: tuple[int, int]
    to: int


def identity(position: Position, data: str) -> dict[str, Any]:
    """What the numbers of samples refer to. `data`: sha256 of the prepared corpus."""
    assert position.order is not None
    return {"data": data, **position.order.to_json()}


def record(run: Path, order: Mapping[str, Any], bad: BadStepError) -> None:
    """Add a batch, or a rollback, and wait for the disk. OSError if the file cannot be written."""
    row = {"order": order, "step": bad.step, "samples": [bad.samples[0], bad.samples[1] - 1]}
    found: dict[str, list[dict[str, Any]]] = {"batches": _rows(run, "batches"), "rollbacks": _rows(run, "rollbacks")}
    if bad.to is None:
        same = (order, row["samples"])
        kept = [each for each in found["batches"] if (each["order"], each["samples"]) != same]
        found["batches"] = [*kept, row | {"reason": bad.verdict.reason}]
    else:
        found["rollbacks"].append(row | {"to": bad.to})
    with files.open_folder(run, follow=True) as opened:
        files.replace(opened, FILE, json.dumps(found) + "\n")
        files.sync(opened)


def forget(run: Path) -> None:
    """Remove what was recorded of a training, where another one begins. OSError."""
    (run / FILE).unlink(missing_ok=True)


def read(run: Path, order: Mapping[str, Any]) -> Ranges:
    """[first, end) of the samples of each recorded batch; none where no batch of this order is recorded."""
    return tuple(_samples(row) for row in _rows(run, "batches") if row["order"] == order)


def failed_before(run: Path, order: Mapping[str, Any], bad: BadStepError) -> tuple[int, int] | None:
    """Return other samples [first, end) on which the run failed at the same step, if there are any."""
    rows = (row for row in _rows(run, "batches") if row["order"] == order and row["step"] == bad.step)
    return next((samples for row in rows if (samples := _samples(row)) != bad.samples), None)


def rollbacks(run: Path) -> tuple[Rollback, ...]:
    """The rollbacks of a run, the first one first."""
    return tuple(Rollback(row["order"], row["step"], _samples(row), row["to"]) for row in _rows(run, "rollbacks"))


def give_up(run: Path) -> None:
    """Put away the checkpoints of trainings that were given up: the next save removes them. OSError."""
    done, folder = rollbacks(run), run / CHECKPOINTS
    found = [(path.name, is_given_up(manifest, done)) for path, manifest in manifests(folder)[0]] if done else []
    if not any(gone for _, gone in found):
        return
    with files.open_folder(folder, follow=True) as opened:
        for name, gone in found:
            if gone:
                with suppress(FileNotFoundError):  # another rank did it
                    files.rename(opened, name, f".purge-{name}")
        files.sync(opened)


def going_back(run: Path, position: Position, recent: Recent, data: str) -> tuple[Position, Recent, str]:
    """Where a run goes on behind its newest checkpoint: with what it gave up since left out; and what to say of it."""
    more = rollbacks(run)[recent.rollbacks :]
    if not more:
        return position, recent, ""
    order = identity(position, data)
    spans = [each.samples for each in more if each.order == order]
    recent = replace(recent, rollbacks=recent.rollbacks + len(more))
    for each in more:
        recent = recent.acting(each.step)
    said = ", ".join(f"{first:,} to {end - 1:,}" for first, end in spans)
    return (
        position.skipping(spans),
        recent,
        f"rolled back at step {more[-1].step:,}: samples {said or 'none'} are left out",
    )


def is_given_up(manifest: Manifest, done: Sequence[Rollback]) -> bool:
    """Whether a checkpoint is of a training that was given up by one of the rollbacks `done` of its run."""
    told = manifest.meta.get("health")
    seen = told.get("rollbacks", 0) if isinstance(told, dict) else 0
    later = done[seen:] if type(seen) is int and seen >= 0 else done
    return any(manifest.step > each.to for each in later)


def _samples(row: Mapping[str, Any]) -> tuple[int, int]:
    first, last = row["samples"]
    return first, last + 1


def _rows(run: Path, kind: str) -> list[dict[str, Any]]:
    """The rows of a kind; none of a file that is not what `record` wrote."""
    try:
        rows = json.loads(read_bytes(run / FILE))[kind]
        return [row for row in rows if _is_row(row, {"to"} if kind == "rollbacks" else set())]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _is_row(row: Mapping[str, Any], more: set[str]) -> bool:
    first, last = row["samples"]
    counts = (first, last, row["step"], *(row[name] for name in more))
    return all(type(each) is int and 0 <= each < 1 << 62 for each in counts) and first <= last
