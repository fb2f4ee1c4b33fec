"""Context parallelism against plain autograd: in float64, in real processes, as in test_differential.py."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from compiler.emit.segment_cache import Segments
from tests.runtime.step.specs import spec
from tests.runtime.step.test_differential import STEPS, check

Documents = Literal["joined", "masked"]


# Model and schedule; pipeline, expert, data, tensor and context ranks, and ZeRO stage; documents and sequence. Latent
# and grouped attention, a window, sinks and scaled rotation, balancing losses of whole sequences, MTP, adapted groups.
SPLIT: list[tuple[str, str, int, int, int, int, int, int, Documents, int]] = [
    ("llama", "1f1b", 1, 1, 1, 1, 4, 1, "joined", 16),
    ("llama", "interleaved", 2, 1, 1, 1, 2, 2, "masked", 4),
    ("everything", "1f1b", 1, 1, 1, 1, 2, 0, "masked", 8),
    ("everything", "zb1p", 2, 2, 1, 2, 2, 1, "masked", 8),
    ("v3", "dualpipe", 2, 2, 2, 1, 2, 1, "masked", 12),
    ("v3", "1f1b", 1, 4, 2, 2, 2, 1, "joined", 4),
    ("v2", "1f1b", 1, 2, 1, 1, 2, 0, "joined", 8),
    ("yarn", "zbv", 2, 1, 1, 2, 2, 0, "joined", 12),
    ("pattern", "1f1b", 1, 1, 1, 1, 2, 3, "joined", 12),
    ("split", "zbv", 2, 1, 1, 2, 2, 1, "masked", 8),
    ("tables", "1f1b", 1, 2, 1, 1, 2, 1, "masked", 8),
]


@pytest.mark.parametrize(("of", "schedule", "pp", "ep", "dp", "tp", "cp", "zero", "documents", "sequence"), SPLIT)
def test_training_on_context_ranks_equals_autograd(
    tmp_path: Path,
    segments: Segments,
    of: str,
    schedule: str,
    pp: int,
    ep: int,
    dp: int,
    tp: int,
    cp: int,
    zero: int,
    documents: Documents,
    sequence: int,
) -> None:
    degrees = {"tensor": tp, "context": cp, "sequence": sequence}
    chosen = spec(pp, ep, dp, 2 * pp, STEPS, zero, of, schedule, documents=documents, **degrees)
    check(tmp_path, segments, {"only": chosen}, pp * dp * tp * cp)


def test_training_on_context_ranks_over_gloo(tmp_path: Path, segments: Segments) -> None:
    chosen = spec(1, 2, 1, 2, STEPS, 1, "v3", "1f1b", context=2, sequence=8)
    check(tmp_path, segments, {"only": chosen}, 2, transport="gloo")
