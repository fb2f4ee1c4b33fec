"""Training with QK-clip against the reference: float64, real processes, bounds at which heads are clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import AdamW, Muon, Spec
from runtime.state import snapshot
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import EVERYTHING, spec
from tests.runtime.step.test_differential import MESHES, STEPS, check, reference_run
from tests.runtime.step.test_layers_again import again
from tests.runtime.step.test_moments import assert_equal, held, trainer_of
from tests.runtime.step.test_muon import with_muon

BOUND = 1.0  # of the ten heads of V3's small model 10, 7, 6, 2 and 1 have a larger logit in five steps
GROUPED = EVERYTHING.model_copy(update={"qk_norm": None})  # a bias, a window, sinks, a softcap, scaled positions


def clipped(chosen: Spec, bound: float = BOUND) -> Spec:
    """The spec with MuonClip."""
    return with_muon(chosen, Muon(weight_decay=0.1, clip=0.5, qk_clip=bound))


def with_adamw(chosen: Spec, bound: float = BOUND) -> Spec:
    optimizer = AdamW(weight_decay=0.1, clip=0.5, qk_clip=bound)
    return chosen.model_copy(update={"train": chosen.train.model_copy(update={"optimizer": optimizer})})


def without_norms(chosen: Spec) -> Spec:
    """The spec with attention that has all options except norms of queries and keys."""
    return chosen.model_copy(update={"model": chosen.model.model_copy(update={"attention": GROUPED})})


@pytest.mark.parametrize(("pp", "ep", "dp", "zero"), MESHES)
def test_muon_clip_equals_the_reference(
    tmp_path: Path, segments: Segments, pp: int, ep: int, dp: int, zero: int
) -> None:
    """Every weight, and the largest logit and the number of clipped heads of every step."""
    count = 3 if pp == 1 else 2 * pp
    chosen = clipped(spec(pp, ep, dp, count, STEPS, zero))
    check(tmp_path, segments, {"only": chosen}, pp * dp)


def test_some_heads_are_clipped_and_others_are_not() -> None:
    """The bound of these tests separates heads, in the first step and in later ones."""
    counts = [count for _, count in reference_run(clipped(spec(1, 1, 1, 3, STEPS)))["logits"]]
    assert counts[0] == 10 and 0 < counts[-1] < 10, counts


# Model and schedule; pipeline, expert, data, tensor and context ranks, and ZeRO stage; more. Grouped queries and
# latent ones without a rank, scaled positions, documents, parts of rows that ranks own, heads that tensor ranks split.
OTHERS: list[tuple[str, str, tuple[int, int, int, int, int], int, dict[str, Any]]] = [
    ("everything", "1f1b", (1, 2, 2, 1, 1), 1, {}),
    ("everything", "dualpipe", (2, 1, 1, 2, 1), 1, {}),
    ("everything", "1f1b", (1, 1, 1, 1, 2), 0, {"documents": "masked", "sequence": 8}),
    ("llama", "1f1b", (1, 1, 2, 1, 1), 3, {}),
    ("llama", "zbv", (2, 1, 1, 2, 2), 1, {"documents": "masked", "sequence": 8}),
    ("v2", "1f1b", (1, 2, 2, 1, 1), 2, {}),
    ("yarn", "zbv", (2, 1, 1, 2, 1), 0, {"documents": "masked"}),
    ("v3", "dualpipe", (2, 2, 1, 2, 2), 1, {"sequence": 12}),
]


@pytest.mark.parametrize(("of", "schedule", "ranks", "zero", "more"), OTHERS)
def test_adamw_with_the_clip_equals_the_reference(
    tmp_path: Path,
    segments: Segments,
    of: str,
    schedule: str,
    ranks: tuple[int, int, int, int, int],
    zero: int,
    more: dict[str, Any],
) -> None:
    pp, ep, dp, tp, cp = ranks
    chosen = spec(pp, ep, dp, 2 * pp, STEPS, zero, of, schedule, tensor=tp, context=cp, **more)
    chosen = with_adamw(without_norms(chosen) if of == "everything" else chosen, 0.5)
    assert any(count for _, count in reference_run(chosen)["logits"][1:])
    check(tmp_path, segments, {"only": chosen}, pp * dp * tp * cp)


def test_layers_that_are_run_again_give_their_logits_once(tmp_path: Path, segments: Segments) -> None:
    chosen = clipped(again(spec(2, 2, 2, 4, STEPS, 1), None))
    check(tmp_path, segments, {"only": chosen}, 4)


def test_training_over_gloo_equals_the_reference(tmp_path: Path, segments: Segments) -> None:
    check(tmp_path, segments, {"only": clipped(spec(2, 2, 2, 4, STEPS, 1))}, 4, transport="gloo")


def short(dp: int, zero: int) -> Spec:
    """BF16 weights with FP32 master weights, which are clipped."""
    return clipped(spec(1, 1, dp, 4 // dp, 4, zero, schedule="1f1b", precision="bf16"), 0.5)


def test_owners_clip_to_the_same_bits_in_bf16(tmp_path: Path, segments: Segments) -> None:
    """Weights and logits are bit-identical whichever rank owns rows."""
    for zero in (0, 1):
        write_build(tmp_path / "builds" / f"zero_{zero}", compile_spec(short(2, zero), segments=segments).files)
    run_module("tests.runtime.step.ranks", tmp_path, 2, "memory")
    for rank in range(2):
        full, parts = (load_file(tmp_path / "out" / f"zero_{zero}" / f"rank_{rank}.safetensors") for zero in (0, 1))
        assert full["logits"][:, 1].all(), "heads are clipped in each step"
        for tensors in (full, parts):
            del tensors["rows"]  # they are summed over the parts of a bucket, in another order
        assert_equal(parts, full)


def test_segments_read_the_clipped_weights_rounded(tmp_path: Path, segments: Segments) -> None:
    trainer = trainer_of(tmp_path, segments, short(1, 0))
    assert trainer.train_step()["clipped_heads"] > 0
    for bucket in trainer.state.buckets:
        for piece in bucket.owned:
            assert torch.equal(bucket.weights_of(piece.part), piece.master.bfloat16())


def test_a_resumed_run_is_equal_to_the_bit(tmp_path: Path, segments: Segments) -> None:
    """The clip has no state: a checkpoint has the same tensors as without it."""
    straight, before, after = (
        trainer_of(tmp_path / name, segments, clipped(short(1, 0), 0.1)) for name in ("straight", "before", "after")
    )
    keys = ("loss", "largest_logit", "clipped_heads")
    rows = [[straight.train_step()[key] for key in keys] for _ in range(4)]
    resumed_rows = [[before.train_step()[key] for key in keys] for _ in range(2)]
    saved = held(before)
    assert saved.keys() == held(trainer_of(tmp_path / "plain", segments, with_muon(short(1, 0)))).keys()
    snapshot.put_state(after.state, lambda names: {name: saved[name] for name in names})
    after.step, after.position = before.step, before.position
    resumed_rows += [[after.train_step()[key] for key in keys] for _ in range(2)]
    assert resumed_rows == rows and rows[0][-1] and rows[2][-1], rows
    assert_equal(held(after), held(straight))


def test_an_unreached_bound_changes_no_bit(tmp_path: Path, segments: Segments) -> None:
    """Attention that returns its largest logits computes the same output as without."""
    plain, bounded = with_muon(short(1, 0)), clipped(short(1, 0), 1e9)
    trainers = [
        trainer_of(tmp_path / name, segments, variant) for name, variant in (("plain", plain), ("bounded", bounded))
    ]
    for _ in range(2):
        without, row = (trainer.train_step() for trainer in trainers)
        assert "largest_logit" not in without and row["clipped_heads"] == 0 < row["largest_logit"]
        assert row["loss"] == without["loss"]
    assert_equal(*map(held, trainers))
