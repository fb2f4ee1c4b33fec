"""Numbers that overflow without injected faults: large weights, and a decay that enlarges them at each step.

A rate of 1 and a decay of 10 multiply each matrix by 1 - 10 per step.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.compiler.cli.forms import FORMS, faults
from tests.runtime.run.place import FOUR_RANKS, V3, saved, untimed
from tests.runtime.run.sick import events, said
from tests.runtime.run.test_fp8_resume import FEW_BITS
from tests.runtime.run.test_health import MESHES, TWO, Runs, numbers, runs

__all__ = ["runs"]  # a fixture

GROWS = dict(rate="1", decay=10, steps=30)
OVERFLOWS: dict[str, dict[str, Any]] = {
    "fp8": MESHES["fp8"],
    **{name: dict(settings, precision="bf16") for name, settings in MESHES.items() if name not in ("bf16", "fp8")},
    "fp32": MESHES["dp"],
    "zero": MESHES["bf16"],
    "fp8_dualpipe": dict(FOUR_RANKS, name="fp8_dualpipe", model=FEW_BITS, precision="fp8_block"),
    "mxfp8": dict(MESHES["fp8"], name="mxfp8", precision="mxfp8"),
    "nvfp4": dict(MESHES["fp8"], name="nvfp4", precision="low"),
}


def large(settings: dict[str, Any]) -> dict[str, Any]:
    model = settings.get("model", V3)
    assert "init_std = 0.02" in model
    return dict(settings, model=model.replace("init_std = 0.02", "init_std = 10"), **GROWS)


def trained(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the validation of the last step."""
    return [{name: value for name, value in row.items() if not name.startswith("validation")} for row in rows]


@pytest.mark.parametrize("mesh", OVERFLOWS)
def test_a_batch_that_overflows_is_skipped_by_all_ranks(runs: Runs, mesh: str) -> None:
    """When there are too many, all ranks end at the same step. Rows are finite, match the events, and equal those of a
    run without these batches."""
    build = runs.build(large(OVERFLOWS[mesh]), "health { not_finite = skip, most = 3 }")
    run = runs.train(build, "run", steps=30, code=1)
    met, rows = events(run, "bad_step"), untimed(run)
    assert [event["action"] for event in met] == ["skip", "skip", "skip", "stop"]
    for event in met:
        assert not faults({"time": "", "event": "bad_step", **event}, FORMS["event_bad_step"])
        wrong = [value for value in (event["loss"], event["grad_norm"]) if isinstance(value, str) or value == 0]
        assert wrong and len(event["prints"]) == OVERFLOWS[mesh]["devices"], "it was computed again, to the same bits"
    assert not events(run, "fault")
    assert rows and all(math.isfinite(row[name]) and row[name] > 0 for row in rows for name in ("loss", "grad_norm"))
    last = rows[-1]["step"]
    left_out = [tuple(event["samples"]) for event in met if event["action"] == "skip" and event["step"] <= last]
    assert sum(row.get("left_out", 0) for row in rows) == len(left_out)
    assert "3 skips or rollbacks in 128 steps were not enough" in said(run)
    undisturbed = runs.without(build, *((first, end + 1) for first, end in left_out), steps=last)
    assert trained(numbers(run)) == trained(numbers(undisturbed))


@pytest.mark.parametrize("mesh", ["tp", "zero"])
def test_an_overflow_rolls_back_and_ends(runs: Runs, mesh: str) -> None:
    """Weights become too large again after each rollback. All ranks roll back alike, and then end. The last checkpoint
    has finite weights."""
    build = runs.build(large(OVERFLOWS[mesh]), "health { not_finite = rollback, back = 1, most = 2, rerun = false }")
    run = runs.train(build, "run", steps=30, code=1)
    assert [event["action"] for event in events(run, "bad_step")] == ["rollback", "rollback", "stop"]
    checkpoint = saved(run)
    assert all(tensor.isfinite().all() for tensor in checkpoint.read(checkpoint.shapes).values())


def test_zero_gradients_of_an_overflow_are_found_with_health(runs: Runs) -> None:
    """Squares in norms overflow before weights do: then the loss is that of guessing, and the gradient is 0. Without a
    `health` block, the run continues until weights overflow too."""
    settings = dict(large(dict(TWO, name="zeros", precision="bf16", model=MESHES["dp"]["model"])), steps=30)
    silent = runs.train(runs.build(settings, ""), "silent", steps=30, code=1)
    zeros = [row["step"] for row in untimed(silent) if row["grad_norm"] == 0]
    assert len(zeros) > 3 and untimed(silent)[zeros[0] - 1]["loss"] == pytest.approx(math.log(300), abs=1e-6)
    watched = runs.train(runs.build(settings, "health { not_finite = stop }"), "watched", steps=30, code=1)
    (met,) = events(watched, "bad_step")
    assert (met["step"], met["grad_norm"]) == (zeros[0], 0.0)
    assert met["reason"].endswith("squares in norms that are too large for their format give zeros")
    assert numbers(watched) == numbers(silent)[: zeros[0] - 1]
