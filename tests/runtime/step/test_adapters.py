"""Adapters on meshes against plain autograd, in float64 and in real processes: gradients, five steps, frozen weights.

The reference is a model with weights W + factor · B · A. Autograd gives the gradient of this sum, from which those of A
and B follow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from compiler.plan.blocks import model_steps
from compiler.plan.plan import make_plan
from compiler.predict.flops import flops_per_token
from compiler.predict.memory_state import rank_states
from dsl.rules.adapter import matrices_of
from dsl.schema import Lora, Spec
from runtime.build.build import Build
from runtime.checkpoint.loading import cut
from runtime.contract import RecipeRatePhase
from runtime.contract.rate import learning_rate
from runtime.contract.weights import A, B, weight_of
from runtime.state.state import build_state
from tests.reference.config import Config
from tests.reference.model import Reference
from tests.reference.training import clip_
from tests.runtime.step.processes import run_module
from tests.runtime.step.samples import RandomSamples, weight
from tests.runtime.step.specs import SEQUENCE, spec
from tests.runtime.step.test_differential import GRADIENT_TOLERANCE, STEPS, WEIGHT_TOLERANCE, batch_losses, close

RANK, ALPHA = 3, 4.5


def adapted(chosen: Spec, **changes: Any) -> Spec:
    """The spec with adapters on every matrix that may have one, and a validation."""
    lora = Lora(rank=RANK, alpha=ALPHA, on=tuple(matrices_of(chosen.model)))
    return chosen.model_copy(update={"adapter": lora, **changes})


def reference_run(chosen: Spec) -> dict[str, Any]:
    """The results of five steps of the reference, on the same samples in one global batch."""
    assert chosen.adapter is not None
    factor, train = ALPHA / RANK, chosen.train
    model = Reference(Config.from_plan(chosen.model.model_dump(mode="json") | {"sequence": SEQUENCE}))
    base = {n: torch.from_numpy(weight(n, tuple(t.shape))) for n, t in model.logical_parameters().items()}
    names = [r.name for r in make_plan(chosen).replicas if r.role == "parameter"]
    adapters: dict[str, Tensor] = {}
    for name in dict.fromkeys(map(weight_of, names)):
        rows, columns = base[name].shape
        for end, shape in ((A, (RANK, columns)), (B, (rows, RANK))):
            adapters[name + end] = torch.from_numpy(weight(name + end, shape)).requires_grad_()
    assert adapters.keys() == {*names}

    optimizer = torch.optim.AdamW(
        adapters.values(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=train.optimizer.weight_decay
    )
    samples = RandomSamples(chosen.model.vocab, SEQUENCE)
    phases = [RecipeRatePhase(p.shape, p.start, p.end, p.end_tokens) for p in train.rate]
    size, rows_, first = train.batch.end, [], {}
    for step in range(STEPS):
        merged = {
            name: base[name] + factor * adapters[name + B] @ adapters[name + A]
            for name in dict.fromkeys(map(weight_of, adapters))
        }
        model.load_logical(base | {name: merged_weight.detach() for name, merged_weight in merged.items()})
        model.zero_grad()
        losses = batch_losses(model, samples, range(step * size, (step + 1) * size), chosen.data.documents)
        losses.total(0.3).backward()
        of_sums = model.logical_gradients()
        optimizer.zero_grad()
        torch.autograd.backward([*merged.values()], [of_sums[name] for name in merged])
        gradients = {name: adapter.grad for name, adapter in adapters.items() if adapter.grad is not None}
        if step == 0:
            first = {name: gradient.clone() for name, gradient in gradients.items()}
        norm = clip_(gradients, train.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(phases, (step + 1) * size * SEQUENCE)
        optimizer.step()
        rows_.append([losses.main.item(), losses.mtp.item(), losses.sequence.item(), norm])
    return {
        "gradients": first,
        "rows": rows_,
        "weights": {n: adapter.detach() for n, adapter in adapters.items()},
        "base": base,
    }


MESHES = [
    ("v3_streams", "1f1b", 2, 2, 2, 1, 1, 1),
    ("v3", "1f1b", 1, 1, 1, 0, 1, 1),
    ("v3", "dualpipe", 2, 2, 2, 0, 1, 1),
    ("v3", "dualpipe", 2, 2, 2, 1, 1, 1),
    ("v3", "zbv", 2, 2, 2, 2, 1, 1),
    ("v3", "dualpipe", 2, 2, 4, 2, 1, 1),
    ("llama", "1f1b", 2, 1, 2, 2, 1, 1),
    ("pattern", "dualpipe", 2, 2, 2, 1, 1, 1),
    ("v3", "1f1b", 1, 2, 2, 1, 2, 1),
    ("split", "dualpipe", 2, 1, 1, 0, 2, 1),
    ("qwen", "zbv", 2, 1, 2, 2, 1, 2),
    ("v3", "1f1b", 1, 2, 8, 2, 1, 2),
    ("v3", "dualpipe", 2, 2, 2, 1, 2, 2),
    ("everything", "1f1b", 1, 2, 4, 0, 1, 2),
]


@pytest.mark.parametrize(("of", "schedule", "pp", "ep", "dp", "zero", "tp", "etp"), MESHES)
def test_training_equals_autograd(
    tmp_path: Path,
    segments: Segments,
    of: str,
    schedule: str,
    pp: int,
    ep: int,
    dp: int,
    zero: int,
    tp: int,
    etp: int,
) -> None:
    chosen = adapted(spec(pp, ep, dp, 2 * pp, STEPS, zero, of, schedule, tensor=tp, expert_tensor=etp))
    write_build(tmp_path / "builds" / "only", compile_spec(chosen, segments=segments).files)
    run_module("tests.runtime.step.ranks", tmp_path, pp * dp * tp, "memory")
    expected, plan = reference_run(chosen), make_plan(chosen)
    trained, frozen = set[str](), set[str]()
    for rank in range(pp * dp * tp):
        results = load_file(tmp_path / "out" / "only" / f"rank_{rank}.safetensors")
        slices = {replica.name: replica.slice for replica in plan.replicas if rank in replica.holders}
        trained_here = {name.removeprefix("gradient/") for name in results if name.startswith("gradient/")}
        for name in trained_here:
            gradient, after = (cut(expected[key][name], slices[name]) for key in ("gradients", "weights"))
            close(f"gradient of {name}", results[f"gradient/{name}"], gradient, GRADIENT_TOLERANCE)
            close(name, results[f"weight/{name}"], after, WEIGHT_TOLERANCE)
        for name, tensor in results.items():
            kind, _, logical = name.partition("/")
            if kind in ("frozen", "bias"):
                original = cut(expected["base"][logical], slices.get(logical))
                assert torch.equal(tensor, original), f"{logical} has moved"
                frozen |= {logical} if kind == "frozen" else set()
        close(
            "losses and norms", results["rows"], torch.tensor(expected["rows"], dtype=torch.float64), WEIGHT_TOLERANCE
        )
        trained |= trained_here
    assert trained == expected["gradients"].keys(), "some adapter is on no rank"
    assert frozen == {r.name for r in plan.replicas if r.role == "frozen"}


def test_frozen_weights_count_two_products() -> None:
    """Adapters count three products; each number of a product is a multiplication and an addition."""
    plain = spec(1, 1, 1, 3, of="llama")
    chosen = adapted(plain)
    matrices = sum(r.num_elements for r in make_plan(plain).replicas if len(r.shape) == 2 and r.name != "embedding")
    adapters = sum(r.num_elements for r in make_plan(chosen).replicas if r.role == "parameter")
    before, after = (flops_per_token(model_steps(s), s.train.micro_batch * SEQUENCE) for s in (plain, chosen))
    assert before.causal - after.causal == pytest.approx(2 * matrices - 3 * 2 * adapters, rel=1e-12)
    assert before.full - before.causal == pytest.approx(after.full - after.causal, rel=1e-12)


@pytest.mark.parametrize(("of", "zero"), [("v3", 0), ("v3", 1), ("llama", 2)])
def test_held_memory_equals_the_plan(tmp_path: Path, segments: Segments, of: str, zero: int) -> None:
    """Neither the plan nor the ranks have gradients or optimizer state for frozen weights."""
    chosen = adapted(spec(2, 1, 2, 4, STEPS, zero, of, "1f1b"))
    write_build(tmp_path / "build", compile_spec(chosen, segments=segments).files)
    plan, planned = Build.open(tmp_path / "build").plan, make_plan(chosen)
    adapters = sum(r.num_elements for r in planned.replicas if r.role == "parameter")
    weights = sum(r.num_elements for r in planned.replicas if r.role == "frozen")
    text = (tmp_path / "build" / "plan.txt").read_text("utf-8")
    assert f"{adapters + weights:,} parameters" in text and f"trained: {adapters:,} in adapters" in text
    assert {parameter.name for parameter in plan.parameters} == {
        r.name for r in planned.replicas if r.role == "parameter"
    }
    for pipeline_rank, memory in enumerate(rank_states(chosen, planned)):
        state = build_state(plan, plan.mesh.dp * pipeline_rank, torch.device("cpu"))
        biases = sum(bias.nbytes for bias in state.biases.values())
        assert memory.weights == biases + sum(bucket.parameters.nbytes for bucket in state.all_buckets)
        assert memory.gradients == sum(bucket.gradients.nbytes for bucket in state.all_buckets)
        moments = [t for bucket in state.all_buckets for piece in bucket.owned for t in piece.state.values()]
        assert memory.optimizer == sum(moment.nbytes for moment in moments) > 0
        assert not any(bucket.owned or bucket.gradients.numel() for bucket in state.frozen)
