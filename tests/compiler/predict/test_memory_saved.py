"""The bytes into which a rank copies saved state equal the plan's host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec, lower_spec
from compiler.predict.memory_state import rank_states, saved_bytes
from dsl.schema.train import Checkpoint
from runtime.build.build import Build
from runtime.checkpoint.publish import TensorPart
from runtime.launch.room import checkpoint_bytes
from runtime.state import snapshot
from runtime.state.state import build_state
from tests.runtime.step.specs import spec, with_copies


@pytest.mark.parametrize(
    ("pp", "ep", "dp", "given"),
    [
        (2, 2, 2, {"zero": 0}),
        (2, 2, 2, {"zero": 1, "schedule": "zbv"}),
        (1, 1, 2, {"zero": 1, "precision": "bf16", "schedule": "1f1b"}),
        (1, 2, 2, {"zero": 3, "schedule": "1f1b"}),
        (1, 1, 4, {"zero": 3, "schedule": "1f1b"}),
    ],
)
def test_a_copy_has_the_planned_size(
    tmp_path: Path, segments: Segments, pp: int, ep: int, dp: int, given: dict[str, Any]
) -> None:
    small = spec(pp, ep, dp, 4, **given)
    small = with_copies(small, dp // 2) if small.parallel.zero == 3 and dp > 2 else small
    run_spec = small.model_copy(update={"train": small.train.model_copy(update={"checkpoint": Checkpoint(every=3)})})
    write_build(tmp_path / "build", compile_spec(run_spec, segments=segments).files)
    plan = Build.open(tmp_path / "build").plan
    copied = []
    for rank in range(plan.mesh.world):
        snapshots = snapshot.take(build_state(plan, rank, torch.device("cpu")), plan, rank).values()
        copied.append(sum((entry.values if isinstance(entry, TensorPart) else entry).nbytes for entry in snapshots))
    assert sum(copied) == checkpoint_bytes(plan)
    largest = [max(copied[begin : begin + plan.mesh.columns]) for begin in range(0, plan.mesh.world, plan.mesh.columns)]
    planned = lower_spec(run_spec).plan
    counted = saved_bytes(run_spec, planned)
    padding = 64 * plan.mesh.world * len(plan.buckets)  # ZeRO's shares are equal, and the last one is not full
    assert all(
        0 <= of_plan - real <= (padding if plan.zero else 0) for of_plan, real in zip(counted, largest, strict=True)
    )
    assert tuple(state.host for state in rank_states(run_spec, planned)) == counted
    at_once = run_spec.train.checkpoint.model_copy(update={"background": False})  # type: ignore[union-attr]
    run_spec = run_spec.model_copy(update={"train": run_spec.train.model_copy(update={"checkpoint": at_once})})
    assert not any(state.host for state in rank_states(run_spec, planned))
