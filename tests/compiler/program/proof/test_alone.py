"""With one expert rank nothing moves: an exchange returns its operand, and no byte counts twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compiler.emit.segment_cache import Segments
from compiler.ir import Body, Plan, Program
from compiler.pipeline import lower_spec
from compiler.plan.split_blocks import held_rows
from compiler.program.proof import ProofError, prove
from dsl.schema import Moe, Spec
from tests.compiler.program.proof.ledger import peak_bytes
from tests.runtime.step.specs import spec
from tests.runtime.step.test_memory import measured_peaks


def with_many_rows(chosen: Spec) -> Spec:
    """Every token goes to all experts, so that the peak of a rank is at an exchange."""
    routing = {"top_k": 8, "groups": 1, "top_groups": 1}
    layers = tuple(
        layer.model_copy(update={"ffn": layer.ffn.model_copy(update=routing)}) if isinstance(layer.ffn, Moe) else layer
        for layer in chosen.model.layers
    )
    return chosen.model_copy(update={"model": chosen.model.model_copy(update={"layers": layers})})


def moved(plan: Plan) -> Plan:
    """The plan as if received rows were separate tensors, as with several ranks."""

    def own_outputs(step):  # type: ignore[no-untyped-def]
        outputs = getattr(step, "sizes", None) and tuple(replace(output, alias="") for output in step.outputs)
        return replace(step, outputs=outputs) if outputs else step

    stages = tuple(replace(stage, steps=tuple(map(own_outputs, stage.steps))) for stage in plan.stages)
    return replace(plan, stages=stages)


@pytest.mark.parametrize(("schedule", "before"), [("zbv", (213504, 344896)), ("dualpipev", (213504, 403616))])
def test_the_peak_is_the_measured_one(
    tmp_path: Path, segments: Segments, schedule: str, before: tuple[int, int]
) -> None:
    """The proven peak is the measured one to the byte, and less than when rows counted as sent and as received."""
    chosen = with_many_rows(spec(2, 1, 1, 4, schedule=schedule))
    peaks = measured_peaks(tmp_path, segments, chosen)
    assert all(peak <= limit for peak, limit in zip(peaks, before, strict=True)) and tuple(peaks) != before


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_a_ledger_by_hand(schedule: str) -> None:
    chosen = with_many_rows(spec(2, 1, 2, 6, schedule=schedule))
    lowered, rows = lower_spec(chosen), held_rows(chosen)
    program, proven = lowered.programs["train_6"], lowered.certificates["train_6"]
    assert [peak_bytes(program, rank, rows) for rank in range(2)] == list(proven.peak_bytes)
    assert sum(step.outputs[0].alias != "" for s in lowered.plan.stages for step in s.steps if hasattr(step, "sizes"))


def test_a_program_without_the_alias_is_refused() -> None:
    """The plan decides which values share a storage, and a program or plan that differs is refused."""
    lowered = lower_spec(spec(2, 1, 1, 2, schedule="1f1b"))
    program = lowered.programs["train_2"]

    def body(one: Body) -> Body:
        return replace(
            one,
            instructions=tuple(
                replace(i, writes=tuple(replace(b, alias="") for b in i.writes)) if i.wait else i
                for i in one.instructions
            ),
        )

    without_alias: Program = replace(program, bodies=tuple(tuple(map(body, row)) for row in program.bodies))
    with pytest.raises(ProofError):
        prove(without_alias, lowered.plan)
    with pytest.raises(ProofError):
        prove(program, moved(lowered.plan))
