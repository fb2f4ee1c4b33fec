"""Expert tensor parallelism against plain autograd: in float64, in real processes, as in test_differential.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.emit.segment_cache import Segments
from tests.compiler.plan.experts.test_trained import scattered
from tests.runtime.step.specs import spec
from tests.runtime.step.test_adapters import adapted
from tests.runtime.step.test_differential import STEPS, check
from tests.runtime.step.test_memory import measured_peaks
from tests.runtime.step.test_nodes import on_nodes

# Model and schedule, then pipeline, expert, data and tensor ranks, those of an expert, and ZeRO stage.
SPLIT = [
    ("v3", "dualpipe", 2, 2, 4, 1, 2, 1),
    ("qwen", "1f1b", 1, 1, 2, 1, 2, 0),
    ("v2", "1f1b", 1, 2, 2, 2, 2, 3),
    ("qwen", "zbv", 2, 1, 1, 2, 2, 2),
    ("v3", "1f1b", 1, 2, 8, 1, 2, 1),
    ("v3", "1f1b", 1, 4, 4, 2, 2, 2),
    ("plain", "dualpipe", 2, 1, 2, 2, 4, 0),
    ("everything", "1f1b", 1, 2, 8, 1, 2, 3),
    ("everything", "1f1b", 1, 2, 4, 1, 2, 0),
    ("everything", "dualpipe", 2, 2, 8, 1, 2, 2),
]


@pytest.mark.parametrize(("of", "schedule", "pp", "ep", "dp", "tp", "etp", "zero"), SPLIT)
def test_training_on_slices_of_experts_equals_autograd(
    tmp_path: Path, segments: Segments, of: str, schedule: str, pp: int, ep: int, dp: int, tp: int, etp: int, zero: int
) -> None:
    """Expert groups over the ranks of all slices, with and without tensor ranks."""
    chosen = spec(pp, ep, dp, 2 * pp, STEPS, zero, of, schedule, tensor=tp, expert_tensor=etp)
    check(tmp_path, segments, {"only": chosen}, pp * dp * tp)


@pytest.mark.parametrize("ep", [1, 2])
def test_slices_of_experts_with_node_routing(tmp_path: Path, segments: Segments, ep: int) -> None:
    """The slices of an expert are on one node, to which a token is sent once for all slices."""
    chosen = on_nodes(spec(1, ep, 4, 2, STEPS, 1, "plain", expert_tensor=4 // ep), 2)
    assert chosen.routes_by_nodes == (ep == 2), (
        "two ranks of a node have two slices of each of their experts, or of four"
    )
    check(tmp_path, segments, {"only": chosen}, 4)


def test_slices_of_experts_that_a_file_places(tmp_path: Path, segments: Segments) -> None:
    chosen, _ = scattered(spec(1, 2, 4, 2, STEPS, 1, "v3", expert_tensor=2))
    check(tmp_path, segments, {"only": chosen}, 4)


def test_slices_over_gloo(tmp_path: Path, segments: Segments) -> None:
    chosen = spec(1, 1, 1, 2, STEPS, 3, "qwen", tensor=2, expert_tensor=2)
    check(tmp_path, segments, {"only": chosen}, 2, transport="gloo")


@pytest.mark.parametrize(
    ("of", "precision", "nodes", "zero"), [("v3", "fp64", 1, 0), ("v3", "bf16", 2, 0), ("everything", "bf16", 1, 3)]
)
def test_rows_of_slices_are_counted(
    tmp_path: Path, segments: Segments, of: str, precision: str, nodes: int, zero: int
) -> None:
    """With the received rows, a rank's memory equals the proof's, to the byte."""
    chosen = spec(1, 2, 4, 2, of=of, precision=precision, expert_tensor=2, zero=zero)
    measured_peaks(tmp_path, segments, on_nodes(chosen, nodes))


def test_adapters_of_slices_are_counted(tmp_path: Path, segments: Segments) -> None:
    measured_peaks(tmp_path, segments, adapted(spec(1, 2, 4, 2, of="everything", expert_tensor=2, zero=2)))


def test_expert_groups_reach_over_context_ranks(tmp_path: Path, segments: Segments) -> None:
    """Two data ranks with two context ranks each form one group of two expert ranks with two slices each."""
    chosen = spec(1, 2, 2, 2, STEPS, 1, "v3", context=2, sequence=8, expert_tensor=2)
    check(tmp_path, segments, {"only": chosen}, 4)
