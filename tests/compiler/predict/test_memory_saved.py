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
from tests.runtime.step.specs import spec


@pytest.mark.parametrize(
    ("pp", "ep", "dp", "given"),
    [
        (2, 2, 2, {"zero": 0}),
        (2, 2, 2, {"zero": 1, "schedule": "zbv"}),
        (1, 1, 2, {"zero": 1, "precision": "bf16", "schedule": "1f1b"}),
        (1, 2, 2, {"zero": 3, "schedule": "1f1b"}),
    ],
)
def test_a_copy_has_the_planned_size(
    tmp_path: Path, segments: Segments, pp: int, ep: int, dp: int, given: dict[str, Any]
) -> None:
    small = spec(pp, ep, dp, 4, **given)
    chosen = small.model_copy(update={"train": small.train.model_copy(update={"checkpoint": Checkpoint(every=3)})})
    write_build(tmp_path / "build", compile_spec(chosen, segments=segments).files)
    plan = Build.open(tmp_path / "build").plan
    copied = []
    for rank in range(plan.mesh.world):
        held = snapshot.take(build_state(plan, rank, torch.device("cpu")), plan, rank).values()
        copied.append(sum((each.values if isinstance(each, TensorPart) else each).nbytes for each in held))
    assert sum(copied) == checkpoint_bytes(plan)
    most = [max(copied[at : at + plan.mesh.columns]) for at in range(0, plan.mesh.world, plan.mesh.columns)]
    planned = lower_spec(chosen).plan
    counted = saved_bytes(chosen, planned)
    padding = 64 * plan.mesh.world * len(plan.buckets)  # ZeRO's shares are equal, and the last one is not full
    assert all(
        0 <= of_plan - real <= (padding if plan.zero else 0) for of_plan, real in zip(counted, most, strict=True)
    )
    assert tuple(each.host for each in rank_states(chosen, planned)) == counted
    at_once = chosen.train.checkpoint.model_copy(update={"background": False})  # type: ignore[union-attr]
    chosen = chosen.model_copy(update={"train": chosen.train.model_copy(update={"checkpoint": at_once})})
    assert not any(each.host for each in rank_states(chosen, planned))
