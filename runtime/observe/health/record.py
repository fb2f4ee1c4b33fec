"""health.json of a run: batches that ended it, for `--skip-batch`, and its rollbacks.

    {"batches": [{"order": {…}, "step": 5, "samples": [32, 39], "reason": "loss nan, …"}],
     "rollbacks": [{"order": {…}, "step": 57, "samples": [288, 455], "to": 36}]}

Samples are numbered in the order of one text and one seed, so batches of another order do not belong to this run. A
rollback is written before the run ends because of it. From then on, checkpoints after its step `to` that do not know
the rollback are discarded: however the run ends, the next start resumes from an earlier checkpoint.
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
from runtime.observe.health.judge import BadStepError, RecentSteps
from runtime.system.regular_files import read_bytes

FILE = "health.json"
LATEST = "LATEST"


@dataclass(frozen=True)
class Rollback:
    """At `step` the run went back to the end of step `target_step`, and continued without `samples` [first, end) of an
    order."""

    order: Mapping[str, Any]
    step: int
    samples: tuple[int, int]
    target_step: int


def identity(position: Position, data: str) -> dict[str, Any]:
    """Return the order that sample numbers refer to. `data`: sha256 of the prepared corpus."""
    assert position.order is not None
    return {"data": data, **position.order.to_json()}


def record(run: Path, order: Mapping[str, Any], bad: BadStepError) -> None:
    """Add a batch or a rollback, and sync to disk. OSError if the file cannot be written."""
    row = {"order": order, "step": bad.step, "samples": [bad.samples[0], bad.samples[1] - 1]}
    rows: dict[str, list[dict[str, Any]]] = {"batches": _rows(run, "batches"), "rollbacks": _rows(run, "rollbacks")}
    if bad.target_step is None:
        batch = (order, row["samples"])
        other_batches = [entry for entry in rows["batches"] if (entry["order"], entry["samples"]) != batch]
        rows["batches"] = [*other_batches, row | {"reason": bad.verdict.reason}]
    else:
        rows["rollbacks"].append(row | {"to": bad.target_step})
    with files.open_folder(run, follow=True) as opened:
        files.replace(opened, FILE, json.dumps(rows) + "\n")
        files.sync(opened)


def forget(run: Path) -> None:
    """Remove the records when a new training starts. OSError if that fails."""
    (run / FILE).unlink(missing_ok=True)


def read(run: Path, order: Mapping[str, Any]) -> Ranges:
    """Return the samples [first, end) of each recorded batch of this order."""
    return tuple(_samples(row) for row in _rows(run, "batches") if row["order"] == order)


def earlier_failed_samples(run: Path, order: Mapping[str, Any], bad: BadStepError) -> tuple[int, int] | None:
    """Return other samples [first, end) on which the run failed at the same step, if there are any."""
    rows = (row for row in _rows(run, "batches") if row["order"] == order and row["step"] == bad.step)
    return next((samples for row in rows if (samples := _samples(row)) != bad.samples), None)


def rollbacks(run: Path) -> tuple[Rollback, ...]:
    """Return the rollbacks of a run, oldest first."""
    return tuple(Rollback(row["order"], row["step"], _samples(row), row["to"]) for row in _rows(run, "rollbacks"))


def give_up(run: Path) -> None:
    """Move discarded checkpoints aside: the next save removes them. OSError if that fails."""
    records, folder = rollbacks(run), run / CHECKPOINTS
    fates = (
        [(path.name, is_given_up(manifest, records)) for path, manifest in manifests(folder).valid] if records else []
    )
    if not any(is_discarded for _, is_discarded in fates):
        return
    with files.open_folder(folder, follow=True) as opened:
        for name, is_discarded in fates:
            if is_discarded:
                with suppress(FileNotFoundError):  # another rank has moved it
                    files.rename(opened, name, f".purge-{name}")
        files.sync(opened)


def restore_with_rollbacks(
    run: Path, position: Position, recent: RecentSteps, data: str
) -> tuple[Position, RecentSteps, str]:
    """Return position and memory after a checkpoint without the samples of later rollbacks, and a note about them."""
    later = rollbacks(run)[recent.rollbacks :]
    if not later:
        return position, recent, ""
    order = identity(position, data)
    spans = [rollback.samples for rollback in later if rollback.order == order]
    recent = replace(recent, rollbacks=recent.rollbacks + len(later))
    for rollback in later:
        recent = recent.after_action(rollback.step)
    samples = ", ".join(f"{first:,} to {end - 1:,}" for first, end in spans)
    return (
        position.skipping(spans),
        recent,
        f"rolled back at step {later[-1].step:,}: samples {samples or 'none'} are left out",
    )


def is_given_up(manifest: Manifest, done: Sequence[Rollback]) -> bool:
    """Whether one of the rollbacks `done` has discarded a checkpoint."""
    memory = manifest.meta.get("health")
    num_before = memory.get("rollbacks", 0) if isinstance(memory, dict) else 0
    later = done[num_before:] if type(num_before) is int and num_before >= 0 else done
    return any(manifest.step > rollback.target_step for rollback in later)


def _samples(row: Mapping[str, Any]) -> tuple[int, int]:
    first, last = row["samples"]
    return first, last + 1


def _rows(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the valid rows of a kind; empty if the file is missing or damaged."""
    try:
        rows = json.loads(read_bytes(run / FILE))[kind]
        return [row for row in rows if _is_row(row, {"to"} if kind == "rollbacks" else set())]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _is_row(row: Mapping[str, Any], keys: set[str]) -> bool:
    first, last = row["samples"]
    counts = (first, last, row["step"], *(row[name] for name in keys))
    return all(type(count) is int and 0 <= count < 1 << 62 for count in counts) and first <= last
