"""Tensor parallelism against plain autograd: in float64, in real processes, as in test_differential.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.emit.segment_cache import Segments
from tests.runtime.step.specs import spec
from tests.runtime.step.test_differential import STEPS, check
from tests.runtime.step.test_nodes import on_nodes

# Model and schedule, then pipeline, data and tensor ranks, and ZeRO stage.
SPLIT = [
    ("llama", "1f1b", 1, 1, 2, 0),
    ("llama", "dualpipe", 2, 2, 2, 1),
    ("llama", "zbv", 2, 1, 2, 0),
    ("llama", "1f1b", 1, 2, 2, 3),
    ("split", "1f1b", 2, 1, 2, 1),
    ("split", "dualpipe", 2, 1, 2, 0),
    ("split", "1f1b", 1, 2, 2, 2),
    ("post", "1f1b", 1, 1, 4, 0),
    ("latent", "dualpipe", 2, 1, 2, 1),
    ("latent", "1f1b", 2, 1, 2, 3),
    ("together", "1f1b", 1, 1, 2, 0),
    ("together", "dualpipe", 2, 2, 2, 1),
    ("together", "zbv", 2, 2, 2, 3),
]

# Of experts: model and schedule, then pipeline, expert, data and tensor ranks, and ZeRO stage.
EXPERTS = [
    ("v3", "dualpipe", 2, 2, 2, 2, 1),
    ("v3", "zbv", 2, 1, 1, 2, 0),
    ("qwen", "1f1b", 1, 2, 2, 2, 3),
    ("v2", "1f1b", 1, 4, 4, 2, 1),
    ("v3", "dualpipe", 2, 4, 2, 2, 1),
    ("qwen", "1f1b", 1, 2, 1, 2, 2),
    ("pattern", "dualpipe", 2, 2, 1, 2, 1),
    ("everything", "1f1b", 1, 2, 2, 2, 3),
    ("tables", "dualpipe", 2, 2, 2, 2, 1),
    ("hybrid", "1f1b", 1, 2, 2, 2, 1),
    ("hybrid", "dualpipe", 2, 1, 1, 2, 2),
]


@pytest.mark.parametrize(("of", "schedule", "pp", "ep", "dp", "tp", "zero"), EXPERTS)
def test_experts_have_tensor_ranks_as_data_ranks(
    tmp_path: Path, segments: Segments, of: str, schedule: str, pp: int, ep: int, dp: int, tp: int, zero: int
) -> None:
    """Expert groups are folded over those of attention: they are adjacent columns with any rows. The output of
    attention may be normed, scaled and biased before experts."""
    specs = {"only": spec(pp, ep, dp, 2 * pp, STEPS, zero, of, schedule, tensor=tp)}
    check(tmp_path, segments, specs, pp * dp * tp)


def test_rows_of_tensor_ranks_are_routed_by_nodes(tmp_path: Path, segments: Segments) -> None:
    """Groups of four expert ranks on two nodes each, from two data ranks with two tensor ranks."""
    chosen = on_nodes(spec(1, 4, 4, 2, STEPS, 1, tensor=2), 4)
    assert chosen.routes_by_nodes
    check(tmp_path, segments, {"only": chosen}, 8)


@pytest.mark.parametrize(("of", "schedule", "pp", "dp", "tp", "zero"), SPLIT)
def test_training_on_tensor_ranks_equals_autograd(
    tmp_path: Path, segments: Segments, of: str, schedule: str, pp: int, dp: int, tp: int, zero: int
) -> None:
    specs = {"only": spec(pp, 1, dp, 2 * pp, STEPS, zero, of, schedule, tensor=tp)}
    check(tmp_path, segments, specs, pp * dp * tp)


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 1), ("zbv", 2)])
def test_training_on_tensor_ranks_with_masked_documents(
    tmp_path: Path, segments: Segments, schedule: str, pp: int
) -> None:
    """Attention has all rows of a sequence, and the starts of its documents."""
    specs = {"only": spec(pp, 1, 1, 2 * pp, STEPS, 1, "split", schedule, documents="masked", tensor=2)}
    check(tmp_path, segments, specs, pp * 2)


def test_logits_of_a_part_that_are_made_again(tmp_path: Path, segments: Segments) -> None:
    """The heads make the logits of their words block by block."""
    chosen = spec(2, 1, 1, 4, STEPS, 1, "latent", "zbv", tensor=2).model_copy(update={"recompute": ("logits",)})
    check(tmp_path, segments, {"only": chosen}, 4)


@pytest.mark.parametrize("zero", [1, 3])
def test_training_on_tensor_ranks_over_gloo(tmp_path: Path, segments: Segments, zero: int) -> None:
    specs = {"only": spec(1, 1, 2, 2, STEPS, zero, "split", "1f1b", tensor=2)}
    check(tmp_path, segments, specs, 4, transport="gloo")


@pytest.mark.parametrize("vocab", [60, 61])
def test_a_pipeline_rank_without_layers(tmp_path: Path, segments: Segments, vocab: int) -> None:
    """Under zbv the first of two ranks may only have the embedding and the head. It exchanges no rows, as both are
    whole: tensor ranks cannot shard a vocabulary of 61 words."""
    chosen = spec(2, 1, 1, 4, STEPS, 1, "llama", "zbv", tensor=2, vocab=vocab)
    chosen = chosen.model_copy(update={"parallel": chosen.parallel.model_copy(update={"layout": "E|tt|tt|L"})})
    check(tmp_path, segments, {"only": chosen}, 4)
