"""not_finite.json of a run: batches whose loss or gradient norm was not finite, for `--skip-batch` to leave out.

    {"order": {…}, "batches": [{"step": 5, "samples": [32, 39], "loss": "nan", "grad_norm": "nan"}]}

Samples are numbered in the order of one text and one seed, so batches of another order are not those of this run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.data.cuts import Ranges
from runtime.position import Position

FILE = "not_finite.json"


def identity(position: Position, data: str) -> dict[str, Any]:
    """What the numbers of samples refer to. `data`: sha256 of the prepared corpus."""
    assert position.order is not None
    return {"data": data, **position.order.to_json()}


def record(run: Path, order: Mapping[str, Any], step: int, samples: tuple[int, int], loss: float, norm: float) -> None:
    """Add the batch of the samples [first, end). OSError if the file cannot be written."""
    met = {"step": step, "samples": [samples[0], samples[1] - 1], "loss": str(loss), "grad_norm": str(norm)}
    batches = [*(each for each in _batches(run, order) if each["samples"] != met["samples"]), met]
    path = run / FILE
    temporary = path.with_name(f".{FILE}.tmp")
    temporary.write_text(json.dumps({"order": order, "batches": batches}) + "\n", "utf-8")
    temporary.replace(path)


def read(run: Path, order: Mapping[str, Any]) -> Ranges:
    """[first, end) of the samples of each recorded batch; none where no batch of this order is recorded."""
    return tuple((first, last + 1) for first, last in (batch["samples"] for batch in _batches(run, order)))


def _batches(run: Path, order: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        found = json.loads((run / FILE).read_text("utf-8"))
        rows = found["batches"] if found["order"] == order else []
        return [row for row in rows if _is_range(row["samples"])]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # none, or not what `record` wrote
        return []


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, list) and [type(each) for each in value] == [int, int] and 0 <= value[0] <= value[1] < 1 << 62
    )
