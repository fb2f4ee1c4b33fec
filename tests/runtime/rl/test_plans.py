"""Plans of runs that learn from rewards: every schedule has the programs, and memory is as proven."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.ir import Program, Use
from compiler.pipeline import compile_spec, lower_spec
from compiler.plan.blocks import model_steps
from compiler.schedule import SCHEDULES
from compiler.tools.inference.language_model import spec_for_one_rank
from dsl.schema import Spec
from runtime.build.build import Build
from runtime.contract import check_programs
from runtime.system.strict_json import FormError
from tests.runtime.rl.test_given import CASES, Trained
from tests.runtime.step.specs import spec, with_rewards, without_mtp
from tests.runtime.step.test_memory import measured_peaks


def reports(program: Program, rank: int) -> list[int]:
    """Micro-batches whose log-probabilities a rank reports, in order."""
    bodies = {body.name: body for body in program.bodies[rank]}
    return [
        invocation.micro_batches[instruction.slot]
        for invocation in program.invocations[rank]
        for instruction in bodies[invocation.body].instructions
        if instruction.kind == "tell" and instruction.site == "logp"
    ]


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 1), *((name, 2) for name in sorted(SCHEDULES))])
def test_every_schedule_reports_and_can_generate(schedule: str, ranks: int) -> None:
    """Each micro-batch once, in training and in the forward-only program; both are proven."""
    policy_spec = spec(ranks, 1, 1, 4, schedule=schedule)
    policy_spec = with_rewards(without_mtp(policy_spec), kl=0.1)
    lowered = lower_spec(policy_spec)
    assert lowered.programs.keys() == lowered.certificates.keys() == {"train_4", "evaluate_4"}
    for program in lowered.programs.values():
        assert sorted(k for rank in range(ranks) for k in reports(program, rank)) == [0, 1, 2, 3]
    loads = {buffer.name for stage in lowered.plan.stages for buffer in stage.loads}
    assert loads == {"tokens", "real", "targets", "old", "advantage", "weight", "reference"}


def test_a_build_without_the_program_that_generates_is_refused(tmp_path: Path, segments: Segments) -> None:
    policy_spec = with_rewards(without_mtp(spec(1, 1, 1, 2, of="llama")))
    write_build(tmp_path / "build", compile_spec(policy_spec, segments=segments).files)
    build = Build.open(tmp_path / "build")
    check_programs(build.plan, build.programs)
    trains = {name: program for name, program in build.programs.items() if name.startswith("train")}
    with pytest.raises(FormError, match=r"train\.grpo: there is no program for it"):
        check_programs(build.plan, trains)
    check_programs(replace(build.plan, train=replace(build.plan.train, grpo=None)), trains)


def test_inference_ignores_the_training_temperature() -> None:
    """`dsc eval` and `dsc generate` compute it without the training temperature."""
    plain = without_mtp(spec(1, 1, 1, 2))
    rewarded = with_rewards(plain, temperature=0.5, kl=0.1)

    def keys(of: Spec) -> list[object]:
        return [(step.site, step.inputs, step.segment.key) for step in model_steps(of) if isinstance(step, Use)]

    assert keys(spec_for_one_rank(rewarded)) == keys(spec_for_one_rank(plain)) != keys(rewarded)


@pytest.mark.parametrize("name", ["to a reference", "again", "hot"])
def test_proven_peak_is_the_measured_one(tmp_path: Path, segments: Segments, name: str) -> None:
    """Including the inputs of each sampled token, and the reported log-probabilities."""
    chosen = CASES[name].spec
    Trained(chosen).draw(0).save(tmp_path / "given" / "0.safetensors")
    measured_peaks(tmp_path, segments, chosen, "tests.runtime.rl.given_ledger")
