"""Models with indexers against plain autograd: in float64, in real processes, as in test_differential.py, with all
weights trained, and with only the indexers trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from compiler.emit.segment_cache import Segments
from dsl.schema import Spec
from tests.runtime.step.specs import spec
from tests.runtime.step.test_differential import STEPS, check

# Schedule; pipeline, expert, data, tensor and context ranks, and ZeRO stage; documents, and the tokens of a sequence.
Mesh = tuple[str, int, int, int, int, int, int, Literal["joined", "masked"], int]
SPARSE: list[Mesh] = [
    ("1f1b", 1, 1, 1, 1, 1, 0, "joined", 6),
    ("dualpipe", 2, 2, 2, 1, 1, 1, "joined", 6),
    ("zbv", 2, 1, 2, 1, 1, 3, "masked", 9),
    ("1f1b", 1, 2, 1, 2, 1, 0, "masked", 8),
    ("dualpipe", 2, 2, 2, 2, 1, 1, "joined", 6),
    ("1f1b", 1, 2, 1, 1, 2, 1, "masked", 12),
    ("zb1p", 2, 2, 1, 2, 2, 1, "joined", 8),
]
DENSE: list[Mesh] = [
    ("1f1b", 1, 1, 1, 1, 1, 0, "joined", 6),
    ("dualpipe", 2, 2, 2, 1, 1, 1, "masked", 6),
    ("zbv", 2, 1, 2, 1, 1, 2, "joined", 6),
    ("1f1b", 2, 2, 1, 2, 2, 0, "masked", 8),
]


def of(mesh: Mesh, **changes: Any) -> tuple[Spec, int]:
    """A spec on a mesh, and its ranks."""
    schedule, pp, ep, dp, tp, cp, zero, documents, sequence = mesh
    degrees = {"tensor": tp, "context": cp, "sequence": sequence}
    chosen = spec(pp, ep, dp, 2 * pp, STEPS, zero, "v32", schedule, documents=documents, **degrees)
    return chosen.model_copy(update=changes), pp * dp * tp * cp


def alone(chosen: Spec) -> Spec:
    return chosen.model_copy(update={"train": chosen.train.model_copy(update={"only": "indexer"})})


@pytest.mark.parametrize("mesh", SPARSE, ids=str)
def test_sparse_attention_equals_autograd(tmp_path: Path, segments: Segments, mesh: Mesh) -> None:
    chosen, ranks = of(mesh)
    check(tmp_path, segments, {"only": chosen}, ranks)


@pytest.mark.parametrize("mesh", DENSE, ids=str)
def test_training_only_indexers_equals_autograd(tmp_path: Path, segments: Segments, mesh: Mesh) -> None:
    """Attention sees all keys. Other weights and moments do not change."""
    chosen, ranks = of(mesh)
    check(tmp_path, segments, {"only": alone(chosen)}, ranks)


@pytest.mark.parametrize("recompute", [("layer",), ("rmsnorm", "mla_up", "attention")], ids=str)
def test_recomputation_changes_no_result(tmp_path: Path, segments: Segments, recompute: tuple[str, ...]) -> None:
    chosen, ranks = of(SPARSE[1], recompute=recompute)
    check(tmp_path, segments, {"sparse": chosen, "dense": alone(chosen)}, ranks)
