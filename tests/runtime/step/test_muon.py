"""Training with Muon against the reference: float64, real processes, the meshes of test_differential.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.emit.segment_cache import Segments
from compiler.plan.plan import make_plan
from compiler.predict.failures import checkpoint_bytes as predicted_bytes
from dsl.schema import Muon, Spec
from runtime.launch.room import checkpoint_bytes
from runtime.run.resume import expected_shapes
from runtime.state import snapshot
from tests.runtime.step.specs import spec
from tests.runtime.step.test_differential import MESHES, STEPS, check
from tests.runtime.step.test_moments import assert_equal, assert_same_under_zero, held, trainer_of

V4 = Muon(weight_decay=0.1, clip=0.5, newton_schulz=8, polish=2, rms=0.18)  # as DeepSeek-V4 (arXiv 2606.19348)
PLAIN = Muon(weight_decay=0.1, clip=0.5, nesterov=False, momentum=0.8)


def with_muon(chosen: Spec, muon: Muon | None = None) -> Spec:
    """The spec with Muon, by default Moonlight's, instead of AdamW."""
    muon = muon or Muon(weight_decay=0.1, clip=0.5)
    return chosen.model_copy(update={"train": chosen.train.model_copy(update={"optimizer": muon})})


@pytest.mark.parametrize(("pp", "ep", "dp", "zero"), MESHES)
def test_muon_equals_the_reference(tmp_path: Path, segments: Segments, pp: int, ep: int, dp: int, zero: int) -> None:
    """Two mesh axes, including owners of matrices: all weights after five steps."""
    count = 3 if pp == 1 else 2 * pp
    check(tmp_path, segments, {"only": with_muon(spec(pp, ep, dp, count, STEPS, zero))}, pp * dp)


@pytest.mark.parametrize(
    ("of", "schedule", "pp", "ep", "dp", "zero", "muon"),
    [
        ("pattern", "dualpipe", 2, 2, 2, 1, V4),
        ("everything", "1f1b", 1, 2, 2, 1, PLAIN),
        ("plain", "zbv", 2, 2, 2, 1, None),
        ("v4", "1f1b", 2, 1, 2, 1, V4),
        ("v3_streams", "1f1b", 2, 1, 2, 1, V4),
    ],
)
def test_muon_of_other_models_equals_the_reference(
    tmp_path: Path, segments: Segments, of: str, schedule: str, pp: int, ep: int, dp: int, zero: int, muon: Muon | None
) -> None:
    """Fused queries, keys and values, products without a gate, biases, sinks, gates of shared experts, tied ends; pools
    of entries, blocks of a projection; what mixes streams."""
    chosen = with_muon(spec(pp, ep, dp, 2 * pp, STEPS, zero, of, schedule), muon)
    check(tmp_path, segments, {"only": chosen}, pp * dp)


def short(dp: int, zero: int) -> Spec:
    """Weights and products in BF16, gradients, master weights and state in FP32."""
    return with_muon(spec(1, 1, dp, 4 // dp, 4, zero, schedule="1f1b", precision="bf16"))


def test_owners_change_no_weight_in_bf16(tmp_path: Path, segments: Segments) -> None:
    """Weights are bit-identical whichever rank updates a matrix under ZeRO or has a shard of the rest."""
    assert_same_under_zero(tmp_path, segments, short(2, 0), short(2, 1))


def test_a_resumed_run_is_equal_to_the_bit(tmp_path: Path, segments: Segments) -> None:
    """A checkpoint has the momentum of matrices and the moments of other parameters, and no other state."""
    chosen = short(1, 0)
    straight, before, after = (
        trainer_of(tmp_path / name, segments, chosen) for name in ("straight", "before", "after")
    )
    losses = [straight.train_step()["loss"] for _ in range(4)]
    resumed_losses = [before.train_step()["loss"] for _ in range(2)]
    saved = held(before)
    assert {name: tensor.shape for name, tensor in saved.items()} == expected_shapes(before.plan)
    assert sum(tensor.nbytes for tensor in saved.values()) == checkpoint_bytes(before.plan)
    assert checkpoint_bytes(before.plan) == predicted_bytes(chosen, make_plan(chosen))
    of_rest = {name.partition("/")[2] for name in saved if name.startswith("moment1/")}
    of_matrices = {name.partition("/")[2] for name in saved if name.startswith("momentum/")}
    assert of_rest | of_matrices == {name.partition("/")[2] for name in saved if name.startswith("weight/")}
    assert not of_rest & of_matrices and {"embedding", "head", "final_norm"} <= of_rest
    assert all(saved[f"weight/{name}"].dim() == 2 for name in of_matrices)
    snapshot.put_state(after.state, lambda names: {name: saved[name] for name in names})
    after.step, after.position = before.step, before.position
    resumed_losses += [after.train_step()["loss"] for _ in range(2)]
    assert resumed_losses == losses
    assert_equal(held(after), held(straight))
