"""The proven peak of live bytes, with the rows received, equals the peak of a running rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.ir.expert_placement import ReceivedRows
from compiler.pipeline import compile_spec, lower_spec
from compiler.predict.memory import rank_memories
from compiler.program.proof import prove
from dsl.schema import Spec
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import spec


@pytest.mark.parametrize(
    ("of", "pp", "ep", "dp", "n", "schedule"),
    [
        ("v3", 2, 2, 2, 6, "dualpipe"),
        ("v3", 4, 2, 2, 8, "dualpipe"),
        ("qwen", 2, 2, 2, 6, "dualpipe"),
        ("llama", 2, 1, 1, 6, "dualpipe"),
        ("v3", 2, 1, 1, 5, "dualpipev"),
        ("v3", 2, 2, 2, 3, "zbv"),
    ],
)
def test_proven_peak_is_the_measured_one(
    tmp_path: Path, segments: Segments, of: str, pp: int, ep: int, dp: int, n: int, schedule: str
) -> None:
    """The proven peak equals the measured one, also with a V, where a message keeps its storage at the bottom."""
    measured_peaks(tmp_path, segments, spec(pp, ep, dp, n, of=of, schedule=schedule))


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(
    ("of", "pp", "ep", "dp", "n", "schedule"),
    [("v3", 2, 2, 2, 4, "zbv"), ("v3", 2, 1, 2, 4, "dualpipe"), ("qwen", 1, 1, 3, 2, "1f1b")],
)
def test_sharded_state_is_gathered_as_proven(
    tmp_path: Path, segments: Segments, of: str, pp: int, ep: int, dp: int, n: int, schedule: str, zero: int
) -> None:
    """Gathered weights and the gradients of a micro-batch are values of a program, counted to the byte."""
    measured_peaks(tmp_path, segments, spec(pp, ep, dp, n, of=of, schedule=schedule, zero=zero))


@pytest.mark.parametrize(
    ("of", "pp", "ep", "dp", "n", "schedule"),
    [
        ("split", 2, 1, 1, 4, "zbv"),
        ("split", 2, 1, 1, 4, "dualpipe"),
        ("llama", 1, 1, 2, 3, "1f1b"),
        ("v3", 2, 2, 2, 4, "zbv"),
    ],
)
def test_rows_of_tensor_ranks_are_put_together_as_proven(
    tmp_path: Path, segments: Segments, of: str, pp: int, ep: int, dp: int, n: int, schedule: str
) -> None:
    """All-gathered rows and reduce-scattered sums are values of a program, counted to the byte."""
    measured_peaks(tmp_path, segments, spec(pp, ep, dp, n, of=of, schedule=schedule, tensor=2))


@pytest.mark.parametrize(
    ("of", "pp", "ep", "dp", "tp", "schedule"), [("v3", 2, 2, 2, 1, "dualpipe"), ("split", 2, 1, 1, 2, "zbv")]
)
def test_sequences_of_context_ranks_are_put_together_as_proven(
    tmp_path: Path, segments: Segments, of: str, pp: int, ep: int, dp: int, tp: int, schedule: str
) -> None:
    measured_peaks(tmp_path, segments, spec(pp, ep, dp, 4, of=of, schedule=schedule, tensor=tp, context=2, sequence=8))


@pytest.mark.parametrize("ep", [1, 2])
def test_padded_rows_are_counted(tmp_path: Path, segments: Segments, ep: int) -> None:
    """With FP8 blocks, an expert's rows are padded to multiples of 128, also on one rank, and are counted to the
    byte."""
    measured_peaks(tmp_path, segments, spec(1, ep, ep, 2, precision="fp8_block", schedule="1f1b"))


def measured_peaks(
    tmp_path: Path, segments: Segments, chosen: Spec, ranks: str = "tests.runtime.step.ledger"
) -> list[int]:
    """Peak bytes of each rank in a step, by its ledger. Asserts that they equal the proof's. `ranks`: their module."""
    pp, dp = chosen.parallel.pipeline, chosen.parallel.columns
    n = chosen.train.batch.end // (chosen.parallel.data * chosen.train.micro_batch)
    write_build(tmp_path / "build", compile_spec(chosen, segments=segments).files)
    run_module(ranks, tmp_path, pp * dp)
    lowered = lower_spec(chosen)
    peaks = []
    for rank in range(pp * dp):
        measured = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        column, pipeline_rank = rank % dp, rank // dp
        rows = {p: json.loads((tmp_path / f"rank_{p * dp + column}.json").read_text())["rows"] for p in range(pp)}

        def recorded(p: int, layer: str, m: int, rows: dict[int, Any] = rows) -> ReceivedRows:
            received = rows[p][f"{layer} {m}"]
            return ReceivedRows(received) if isinstance(received, int) else ReceivedRows(*received)

        certificate = prove(lowered.programs[f"train_{n}"], lowered.plan, recorded)
        assert measured["peak"] == certificate.peak_bytes[pipeline_rank], f"rank {rank}"
        planned = rank_memories(
            chosen,
            lowered.lowering,
            lowered.schedules[f"train_{n}"],
            rows=recorded,
        )[pipeline_rank]
        assert measured["peak"] == planned.activations + planned.buffers, f"rank {rank}"
        peaks.append(measured["peak"])
    return peaks
