"""Context parallelism against plain autograd: in float64, in real processes, as in test_differential.py."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from compiler.emit.segment_cache import Segments
from tests.runtime.step.specs import spec
from tests.runtime.step.test_differential import STEPS, check


class Case(NamedTuple):
    """A model, its schedule, the ranks along each dimension, the ZeRO stage, and the samples."""

    model: str
    schedule: str
    sequence: int
    documents: Literal["joined", "masked"]
    cp: int
    pp: int = 1
    ep: int = 1
    dp: int = 1
    tp: int = 1
    zero: int = 0


# The models have latent and grouped attention, a window, sinks and scaled RoPE, balance losses of whole sequences, MTP,
# and layers of several kinds.
CASES = [
    Case("llama", "1f1b", sequence=16, documents="joined", cp=4, zero=1),
    Case("llama", "interleaved", sequence=4, documents="masked", cp=2, pp=2, zero=2),
    Case("everything", "1f1b", sequence=8, documents="masked", cp=2),
    Case("everything", "zb1p", sequence=8, documents="masked", cp=2, pp=2, ep=2, tp=2, zero=1),
    Case("v3", "dualpipe", sequence=12, documents="masked", cp=2, pp=2, ep=2, dp=2, zero=1),
    Case("v3", "1f1b", sequence=4, documents="joined", cp=2, ep=4, dp=2, tp=2, zero=1),
    Case("v2", "1f1b", sequence=8, documents="joined", cp=2, ep=2),
    Case("yarn", "zbv", sequence=12, documents="joined", cp=2, pp=2, tp=2),
    Case("pattern", "1f1b", sequence=12, documents="joined", cp=2, zero=3),
    Case("split", "zbv", sequence=8, documents="masked", cp=2, pp=2, tp=2, zero=1),
    Case("tables", "1f1b", sequence=8, documents="masked", cp=2, ep=2, zero=1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-{case.schedule}")
def test_training_on_context_ranks_equals_autograd(tmp_path: Path, segments: Segments, case: Case) -> None:
    chosen = spec(
        pp=case.pp,
        ep=case.ep,
        dp=case.dp,
        num_micro_batches=2 * case.pp,
        steps=STEPS,
        zero=case.zero,
        of=case.model,
        schedule=case.schedule,
        documents=case.documents,
        tensor=case.tp,
        context=case.cp,
        sequence=case.sequence,
    )
    check(tmp_path, segments, {"only": chosen}, case.pp * case.dp * case.tp * case.cp)


def test_training_on_context_ranks_over_gloo_equals_autograd(tmp_path: Path, segments: Segments) -> None:
    chosen = spec(1, 2, 1, 2, STEPS, 1, "v3", "1f1b", context=2, sequence=8)
    check(tmp_path, segments, {"only": chosen}, 2, transport="gloo")
