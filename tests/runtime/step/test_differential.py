"""The compiled trainer against a plain torch.nn model with ordinary autograd, in float64 and in real processes.

For every mesh and number of micro-batches: losses and every gradient after the first backward, every weight and
balancing bias after five optimizer steps, on every rank that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.ir import Buffer, Communication, Plan
from compiler.ir.dtypes import ITEMSIZE
from compiler.pipeline import compile_spec
from compiler.plan.plan import make_plan
from compiler.plan.sharding import crossing_of
from dsl.closed_forms import ramp
from dsl.schema import AnyOptimizer, Model, Spec
from runtime.build.build import Build
from runtime.checkpoint.loading import cut
from runtime.contract import RecipeRatePhase
from runtime.contract.rate import learning_rate, tokens_after
from runtime.contract.slices import Slice
from tests.reference.config import Config
from tests.reference.indexer import LightningIndexer
from tests.reference.model import Reference, Router
from tests.reference.muon import Muon, MuonRecipe
from tests.reference.qk_clip import clip_logits_
from tests.reference.training import AdamW, Recipe, balance_, clip_
from tests.runtime.step.processes import run_module
from tests.runtime.step.samples import RandomSamples, num_held_out, table, weight
from tests.runtime.step.specs import SEQUENCE, spec, with_copies

STEPS = 5
GRADIENT_TOLERANCE = 1e-10  # relative to the largest reference element of the tensor
WEIGHT_TOLERANCE = 1e-8

# (pipeline, expert, data) and ZeRO stage; micro-batch counts 2P, 2P + 2 and 4P, and 3 and 4 for one pipeline rank
MESHES = [(1, 1, 1, 0), (2, 1, 1, 0), (2, 2, 2, 0), (4, 1, 1, 0), (4, 2, 2, 0), (2, 4, 4, 0), (2, 2, 2, 1)]

# model (V3 above) and schedule, then as above: softmax gates and none, no bias, no MTP, no shared expert, no query
# rank, all options of attention, compressed entries, tables that choose experts
OTHER_MODELS = [
    ("llama", "dualpipe", 4, 1, 1, 0),
    ("llama", "1f1b", 2, 1, 2, 1),
    ("qwen", "dualpipe", 2, 2, 2, 1),
    ("v2", "dualpipe", 2, 2, 2, 0),
    ("v2", "1f1b", 2, 4, 4, 0),
    ("pattern", "dualpipe", 2, 2, 2, 1),
    ("pattern", "1f1b", 2, 1, 2, 3),
    ("everything", "dualpipe", 2, 2, 2, 0),
    ("v4", "dualpipe", 2, 2, 2, 1),
    ("v4", "1f1b", 2, 1, 2, 3),
    ("yarn", "1f1b", 2, 1, 2, 1),
    ("tables", "dualpipe", 2, 2, 2, 1),
    ("tables", "1f1b", 2, 4, 4, 3),
    ("hybrid", "dualpipe", 2, 2, 2, 1),
    ("hybrid", "1f1b", 2, 1, 2, 3),
]


def micro_batch_counts(pp: int) -> tuple[int, ...]:
    return (3, 4) if pp == 1 else (2 * pp, 2 * pp + 2, 4 * pp)


def close(name: str, ours: Tensor, reference: Tensor, tolerance: float) -> None:
    largest = reference.abs().max().item()
    if largest == 0:
        assert ours.abs().max().item() == 0, f"{name}: the reference is 0"
    else:
        error = (ours - reference).abs().max().item() / largest
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


def reference_of(model: Model, sequence: int = SEQUENCE) -> Reference:
    """The reference of a model."""
    return Reference(Config.from_plan(model.model_dump(mode="json") | {"sequence": sequence}))


def value(model: Reference, name: str, like: Tensor) -> Tensor:
    """The initial value of a tensor of the reference, which only depends on its name."""
    shape = tuple(like.shape)
    if like.is_floating_point():
        return torch.from_numpy(weight(name, shape))
    router = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(router, Router)
    return torch.from_numpy(table(name, shape, router.moe.experts))


def reference_run(chosen: Spec, make: Callable[[Model, int], Reference] = reference_of) -> dict[str, Any]:
    """The results of five steps of the reference, on the same samples in one global batch."""
    sequence = chosen.train.sequence
    model = make(chosen.model, sequence)
    indexers = [indexer for indexer in model.modules() if isinstance(indexer, LightningIndexer)]
    alone = chosen.train.only == "indexer"
    for indexer in indexers:
        indexer.dense = alone
    model.load_logical({name: value(model, name, tensor) for name, tensor in model.logical_parameters().items()})
    train = chosen.train
    recipe = Recipe(rates=(), weight_decay=train.optimizer.weight_decay, clip=train.optimizer.clip, eps=1e-8)
    optimizer = optimizer_of(model, train.optimizer, recipe)
    if alone:
        optimizer.parameters = {n: p for n, p in optimizer.parameters.items() if ".indexer." in n}
    samples = RandomSamples(chosen.model.vocab, sequence)
    phases = [RecipeRatePhase(p.shape, p.start, p.end, p.end_tokens) for p in train.rate]
    rows, index, logits, first, before = [], [], list[tuple[float, int]](), {}, 0
    sizes = [size for size, steps in ramp.ramp_of_spec(chosen).phases(train.tokens) for _ in range(steps)]
    for step, size in enumerate(sizes):
        after = before + size
        losses = batch_losses(model, samples, range(before, after), chosen.data.documents)
        model.zero_grad()
        losses.total(0.3).backward()
        gradients = model.logical_gradients()
        if alone:
            gradients = {n: g if n in optimizer.parameters else torch.zeros_like(g) for n, g in gradients.items()}
        if step == 0:
            first = {n: g.clone() for n, g in gradients.items()}
            loads = dict(losses.loads)
        norm = clip_(gradients, recipe.clip)
        optimizer.step_(gradients, learning_rate(phases, after * sequence))
        if (bound := train.optimizer.qk_clip) is not None:
            logits.append(clip_logits_(model, bound))
        if not alone:
            balance_(model, losses.loads, before * sequence)
        nats = sum(part.item() for indexer in indexers for part in indexer.nats)
        index.append(nats / (max(1, len(indexers)) * size * sequence))
        rows.append([losses.main.item(), losses.mtp.item(), losses.sequence.item(), norm])
        before = after
    with torch.no_grad():
        last = batch_losses(model, samples, range(num_held_out(sizes[-1])), chosen.data.documents)
    validation = torch.tensor([last.main.item(), last.mtp.item()], dtype=torch.float64)
    weights = model.logical_parameters()
    results = {"gradients": first, "loads": loads, "rows": rows, "weights": weights, "validation": validation}
    return results | {"index": torch.tensor(index, dtype=torch.float64), "logits": logits}


def optimizer_of(model: Reference, row: AnyOptimizer, recipe: Recipe) -> AdamW | Muon:
    """The reference implementation of a spec's optimizer."""
    parameters = dict(model.named_parameters())
    if row.kind == "adamw":
        return AdamW(parameters, recipe)
    assert row.kind == "muon", f"no optimizer of tests/reference computes {row.kind!r}: write one, and name it here"
    return Muon(model.config, parameters, recipe, MuonRecipe(**row.settings()))


def batch_losses(model: Reference, samples: RandomSamples, indices: range, documents: str) -> Any:
    z = torch.from_numpy(np.stack([samples.tokens(i) for i in indices]))
    sequence = samples.sequence
    targets = [z[:, ahead : sequence + ahead].clone() for ahead in (1, 2)]
    if documents == "joined":
        return model.losses(z.clamp(min=0), *targets)
    starts = torch.from_numpy(np.stack([samples.starts(i) for i in indices]))
    for ahead, shifted in enumerate(targets, start=1):  # of another document than the token that predicts it
        shifted[starts[:, ahead : sequence + ahead] != starts[:, :sequence]] = -1
    return model.losses(z.clamp(min=0), *targets, starts[:, :sequence])


@pytest.mark.parametrize(("pp", "ep", "dp", "zero"), MESHES)
def test_training_equals_autograd(tmp_path: Path, segments: Segments, pp: int, ep: int, dp: int, zero: int) -> None:
    specs = {f"n{n:02}": spec(pp, ep, dp, n, STEPS, zero) for n in micro_batch_counts(pp)}
    check(tmp_path, segments, specs, pp * dp)


def check(
    tmp_path: Path,
    segments: Segments,
    specs: Mapping[str, Spec],
    world: int,
    transport: str = "memory",
    make: Callable[[Model, int], Reference] = reference_of,
) -> None:
    """Train every spec on `world` ranks and compare the results of each rank."""
    for name, chosen in specs.items():
        build = compile_spec(chosen, segments=segments)
        write_build(tmp_path / "builds" / name, build.files)
    run_module("tests.runtime.step.ranks", tmp_path, world, transport)
    references: dict[str, dict[str, Any]] = {}  # by model and recipe: references do not depend on the mesh
    for name, chosen in specs.items():
        recipe = f"{chosen.model!r} {chosen.train!r} {chosen.data!r}"
        expected = references[recipe] = references.get(recipe) or reference_run(chosen, make)
        names: set[str] = set()
        plan, parallel = make_plan(chosen), chosen.parallel
        count = chosen.train.batch.start // (parallel.data * chosen.train.micro_batch)
        batches = Build.open(tmp_path / "builds" / name).plan.batches
        drawn = tokens_after(batches, chosen.train.sequence, STEPS) // chosen.train.sequence
        for rank in range(world):
            results = load_file(tmp_path / "out" / name / f"rank_{rank}.safetensors")
            slices = {replica.name: replica.slice for replica in plan.replicas if rank in replica.holders}
            names |= compare(results, expected, slices)
            if parallel.tensor == 1:  # else it is the mean of the losses of the heads of each tensor rank
                close("losses of indexers", results["index"], expected["index"], WEIGHT_TOLERANCE)
            num_samples = drawn // parallel.data if reads(plan, rank // parallel.columns) else 0
            assert results["read"].item() == num_samples, "samples that were read, each once"
            if transport == "memory":
                crossing = crossing_of(plan, rank // parallel.columns, count)
                assert results["sent"].item() == sum(crossing), "bytes of gradients, weights and rows"
                if "exchanged" in results:
                    assert results["exchanged"].item() == exchanged_bytes(plan, rank // parallel.columns, results)
                divided = parallel.zero if parallel.columns > 1 else 0
                assert (crossing.gradients > 0, crossing.weights > 0) == (divided >= 2, divided == 3)
        assert names == expected["gradients"].keys(), "some parameter is on no rank"
        rows = sum(crossing_of(plan, rank, count).rows for rank in range(parallel.pipeline))
        assert (rows > 0) == (parallel.tensor * parallel.context > 1)


def reads(plan: Plan, rank: int) -> bool:
    """Whether a pipeline rank reads samples: for tokens, targets, or the number of targets."""
    loaded = {buffer.name for stage in plan.stages_of(rank) for buffer in plan.stages[stage].loads}
    return rank == 0 or bool(loaded - {"starts", "positions"})


def exchanged_bytes(plan: Plan, rank: int, left: Mapping[str, Tensor]) -> int:
    """Bytes that a device of a pipeline rank dispatches to and combines from experts on other ranks, by the plan."""
    stages = [plan.stages[stage] for stage in plan.stages_of(rank)]
    steps = [s for stage in stages for s in stage.steps if isinstance(s, Communication) and s.axis == "ep"]
    assert {f"routed/{step.site}" for step in steps} == {name for name in left if name.startswith("routed/")}
    total = 0
    for step in steps:
        outward, back = left[f"routed/{step.site}"].tolist()
        forward, backward = (outward, back) if step.kind == "dispatch" else (back, outward)
        total += forward * (1 + step.is_repeated) * row_bytes(step.sizes) + backward * row_bytes(step.arriving)
    return total


def row_bytes(buffers: Sequence[Buffer]) -> int:
    """Bytes of a row of the exchanged tensors; counts are not rows."""
    rows = [buffer for buffer in buffers if buffer.dtype != "int64"]
    return sum(prod(map(int, buffer.shape[1:])) * ITEMSIZE[buffer.dtype] for buffer in rows)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_training_over_gloo_equals_autograd(tmp_path: Path, segments: Segments, zero: int) -> None:
    """These ranks train over gloo, as ranks on several machines do."""
    check(tmp_path, segments, {"only": spec(2, 2, 2, 4, STEPS, zero)}, 4, transport="gloo")


# Model and schedule, then as above: stages with one copy and with two, tied embeddings on one rank and on two.
DIVIDED = [
    ("v3", "dualpipe", 2, 2, 4),
    ("v3", "zbv", 2, 2, 2),
    ("v3", "1f1b", 2, 2, 4),
    ("v3", "dualpipev", 2, 1, 2),
    ("llama", "interleaved", 2, 1, 2),
    ("qwen", "1f1b", 1, 2, 4),
]


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(("of", "schedule", "pp", "ep", "dp"), DIVIDED)
def test_training_on_divided_state_equals_autograd(
    tmp_path: Path, segments: Segments, of: str, schedule: str, pp: int, ep: int, dp: int, zero: int
) -> None:
    check(tmp_path, segments, {"only": spec(pp, ep, dp, 2 * pp, STEPS, zero, of, schedule)}, pp * dp)


# As above, and the data ranks that share a copy, and tensor ranks: copies on one and on several pipeline ranks, experts
# that a copy holds once, and copies that are single data ranks.
COPIES = [
    ("v3", "dualpipe", 2, 2, 4, 2, 1),
    ("v3", "1f1b", 1, 2, 4, 2, 1),
    ("qwen", "1f1b", 1, 2, 8, 4, 1),
    ("llama", "zbv", 2, 1, 2, 1, 2),
]


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(("of", "schedule", "pp", "ep", "dp", "shard", "tensor"), COPIES)
def test_training_on_copies_of_shards_equals_autograd(
    tmp_path: Path,
    segments: Segments,
    of: str,
    schedule: str,
    pp: int,
    ep: int,
    dp: int,
    shard: int,
    tensor: int,
    zero: int,
) -> None:
    chosen = with_copies(spec(pp, ep, dp, 2 * pp, STEPS, zero, of, schedule, tensor=tensor), shard)
    check(tmp_path, segments, {"only": chosen}, pp * dp * tensor)


def test_training_on_copies_of_shards_over_gloo(tmp_path: Path, segments: Segments) -> None:
    chosen = with_copies(spec(1, 1, 4, 2, STEPS, 3, "llama", "1f1b"), 2)
    check(tmp_path, segments, {"only": chosen}, 4, transport="gloo")


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_sums_under_the_backward_have_the_same_bits(
    tmp_path: Path, segments: Segments, transport: str, zero: int
) -> None:
    """They are bit-identical to sums that all start after the last backward."""
    early = spec(2, 2, 2, 4, STEPS, zero)
    late = early.model_copy(update={"parallel": early.parallel.model_copy(update={"overlap_reduce": False})})
    for name, chosen in {"early": early, "late": late}.items():
        write_build(tmp_path / "builds" / name, compile_spec(chosen, segments=segments).files)
    run_module("tests.runtime.step.ranks", tmp_path, 4, transport)
    for rank in range(4):
        early_results, late_results = (
            load_file(tmp_path / "out" / name / f"rank_{rank}.safetensors") for name in ("early", "late")
        )
        assert early_results.keys() == late_results.keys()
        assert [name for name in early_results if not torch.equal(early_results[name], late_results[name])] == []


@pytest.mark.parametrize(("of", "schedule", "pp", "ep", "dp", "zero"), OTHER_MODELS)
def test_training_other_models_equals_autograd(
    tmp_path: Path, segments: Segments, of: str, schedule: str, pp: int, ep: int, dp: int, zero: int
) -> None:
    specs = {"only": spec(pp, ep, dp, 2 * pp, STEPS, zero, of, schedule)}
    check(tmp_path, segments, specs, pp * dp)


# As above: latent and grouped attention with experts and MTP, a window with sinks, a rotation before attention;
# micro-batches in drawing order, and by the cost of their documents.
DOCUMENTS = [
    ("v3", "dualpipe", 2, 2, 2, 0, "cost"),
    ("llama", "1f1b", 1, 1, 1, 0, "drawn"),
    ("everything", "1f1b", 1, 1, 2, 1, "drawn"),
    ("yarn", "zbv", 2, 1, 2, 1, "cost"),
    ("hybrid", "1f1b", 2, 1, 2, 0, "drawn"),
]


@pytest.mark.parametrize(("of", "schedule", "pp", "ep", "dp", "zero", "order"), DOCUMENTS)
def test_training_on_masked_documents(
    tmp_path: Path, segments: Segments, of: str, schedule: str, pp: int, ep: int, dp: int, zero: int, order: str
) -> None:
    """The reference computes attention for each document separately, and all samples of a step in one batch."""
    chosen = spec(pp, ep, dp, 2 * pp, STEPS, zero, of, schedule, documents="masked")
    chosen = chosen.model_copy(update={"schedule": chosen.schedule.model_copy(update={"order": order})})
    check(tmp_path, segments, {"only": chosen}, pp * dp)


def compare(
    ours: Mapping[str, Tensor], expected: Mapping[str, Any], slices: Mapping[str, Slice | None] = MappingProxyType({})
) -> set[str]:
    """Compare all tensors of a rank, which has `slices` of the reference. Returns its parameters."""
    names = {name.removeprefix("gradient/") for name in ours if name.startswith("gradient/")}
    for name in names:
        gradient, weight = (cut(expected[key][name], slices.get(name)) for key in ("gradients", "weights"))
        close(f"gradient of {name}", ours[f"gradient/{name}"], gradient, GRADIENT_TOLERANCE)
        close(name, ours[f"weight/{name}"], weight, WEIGHT_TOLERANCE)
    for name in (n.removeprefix("bias/") for n in ours if n.startswith("bias/")):
        assert torch.equal(ours[f"bias/{name}"], expected["weights"][name]), name
    for name, load in expected["loads"].items():
        assert ours[f"load/{name}"].tolist() == load.tolist(), name
    close("first step", ours["rows"][0], torch.tensor(expected["rows"][0], dtype=torch.float64), GRADIENT_TOLERANCE)
    close("steps", ours["rows"], torch.tensor(expected["rows"], dtype=torch.float64), WEIGHT_TOLERANCE)
    if "validation" in expected:
        close("validation", ours["validation"], expected["validation"], WEIGHT_TOLERANCE)
    if expected.get("logits"):
        largest, clipped = torch.tensor(expected["logits"], dtype=torch.float64).T
        close("largest logits", ours["logits"][:, 0], largest, WEIGHT_TOLERANCE)
        assert torch.equal(ours["logits"][:, 1], clipped), "heads that are clipped"
    return names
