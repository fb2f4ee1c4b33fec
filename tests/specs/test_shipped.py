"""Every shipped spec is valid, formatted and planned: placement, schedules, programs for every batch size, proofs."""

from __future__ import annotations

import sys
from subprocess import run

import pytest

from compiler.ir import Use
from compiler.pipeline import lower_spec
from dsl import load
from dsl.closed_forms import ramp
from tests.specs.shipped import FILES, RUNS, SPECS, planned, shipped

# A missing spec is noticed, and so is one that is not listed here.
NAMED = (
    "deepseek-v3.dsc", "deepseek-v2.dsc", "deepseek-v2-lite.dsc", "moonlight-16b-a3b.dsc", "kimi-k2.dsc",
    "llama3-8b.dsc", "qwen3-30b-a3b.dsc", "moe-8gpu.dsc", "single-gpu.dsc", "quickstart.dsc", "tiny.dsc",
    "laptop-gqa.dsc", "laptop-v2.dsc", "laptop-hybrid.dsc", "laptop-long.dsc", "laptop-v32.dsc",
    "deepseek-v3-128k.dsc", "deepseek-v3.2.dsc", "deepseek-v4-flash.dsc", "deepseek-v4-pro.dsc", "laptop-v4.dsc",
    "bench-4.dsc", "bench-8.dsc", "r1-tiny.dsc",
)  # fmt: skip


def test_all_shipped_specs_are_listed() -> None:
    assert sorted({file for file, _ in RUNS}) == sorted(NAMED)


@pytest.mark.parametrize("file", FILES)
def test_is_right(file: str) -> None:
    assert load.check(SPECS / file) == ()


def test_are_formatted() -> None:
    process = run(
        (sys.executable, "-P", "-m", "compiler.cli.main", "fmt", "--check", str(SPECS)), capture_output=True, text=True
    )
    assert (process.returncode, process.stdout) == (0, ""), process.stdout + process.stderr


@pytest.mark.parametrize(("file", "run"), RUNS)
def test_is_planned(file: str, run: str) -> None:
    """No layer is lost or doubled, all devices have work, and there is a proven program for each size of the batch."""
    spec, lowered = shipped(file, run), planned(file, run)
    plan = lowered.plan
    sites = [step.site for stage in plan.stages for step in stage.steps if isinstance(step, Use)]
    layers = dict.fromkeys(site.partition(".")[0] for site in sites if site.startswith("L"))
    assert [*layers] == [f"L{layer}" for layer in range(spec.model.num_layers)]
    assert len(set(sites)) == len(sites)
    assert {rank for replica in plan.replicas for rank in replica.holders} == set(range(spec.cluster.world))

    sequences = spec.parallel.data * spec.train.micro_batch
    sizes = [batch // sequences for batch, steps in ramp.ramp_of_spec(spec).phases(spec.train.tokens)]
    trained = {name for name in lowered.certificates if name.startswith("train_")}
    assert trained == {f"train_{size}" for size in sizes}
    for name, certificate in lowered.certificates.items():
        assert f"_{certificate.num_micro_batches}" in name
        stages = len(plan.stages)
        assert certificate.num_actions >= certificate.num_micro_batches * stages * (2 if name in trained else 1)


def test_deepseek_v3_as_published() -> None:
    """16-way pipeline, 64-way expert parallelism over 8 nodes, 24 to 120 micro-batches (arXiv 2412.19437)."""
    lowered = planned("deepseek-v3.dsc", "pretrain")
    mesh = lowered.plan.mesh
    assert (mesh.world, mesh.pp, mesh.dp, mesh.ep) == (2048, 16, 128, 64)
    counts = sorted(certificate.num_micro_batches for certificate in lowered.certificates.values())
    assert counts == list(range(24, 121, 2))
    assert lowered.certificates["train_24"].program == "zbv", "DualPipe takes 32 at least"
    assert lowered.certificates["train_120"].program == "dualpipe"
    experts = [replica for replica in lowered.plan.replicas if replica.name.startswith("layers.3.ffn.experts.")]
    on_one = {replica.name.split(".")[4] for replica in experts if experts[0].holders[0] in replica.holders}
    assert on_one == {"0", "1", "2", "3"}, "4 of 256 experts on a device"


def test_deepseek_v2_as_published() -> None:
    """16-way pipeline, 8-way expert parallelism, 2,304 to 9,216 sequences (arXiv 2405.04434, §3.1)."""
    spec = shipped("deepseek-v2.dsc")
    mesh = planned("deepseek-v2.dsc", "pretrain").plan.mesh
    assert (mesh.pp, mesh.ep) == (16, 8)
    phases = ramp.ramp_of_spec(spec).phases(spec.train.tokens)
    assert (phases[0][0], phases[-1][0]) == (2304, 9216)
    ends = [round(phase.end_tokens / spec.train.tokens, 6) for phase in spec.train.rate[1:]]
    assert ends == [0.6, 0.9, 1.0]
    assert [phase.end for phase in spec.train.rate] == pytest.approx([2.4e-4, 2.4e-4, 7.584e-5, 2.396544e-5])


def test_eight_bit_roles_are_planned() -> None:
    """Weights and activations of one byte: no recipe trains so, but every dtype of the language has a size."""
    spec = shipped("tiny.dsc")
    precision = spec.precision.model_copy(update={"parameter": "e4m3", "compute": "e4m3"})
    small = lower_spec(spec.model_copy(update={"precision": precision}))
    assert (
        0
        < small.certificates["train_4"].peak_bytes[0]
        < planned("tiny.dsc", "tiny").certificates["train_4"].peak_bytes[0]
    )
