"""Tensor-parallel layers against the same model on one rank: all ranks in one process, with autograd through their
exchanges, in float64. Brute force: full weights are sliced by the replica table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from compiler import ir
from compiler.model.segments.interpret import interpret
from compiler.plan.blocks import model_steps
from compiler.plan.parameters import parameters, tensors
from compiler.plan.plan import make_plan
from dsl.load import load as load_spec
from dsl.schema import Dense, Gqa, HyperConnections, Mla, Model, Rope, Spec
from runtime.checkpoint.loading import cut
from tests.compiler.model.segments import plain
from tests.compiler.model.segments.running import assert_equal, by_autograd, by_segment, load
from tests.compiler.model.segments.test_segments import arguments
from tests.runtime.step.specs import EVERYTHING, MICRO_BATCH, SEQUENCE, YARN, gqa, mla, model, spec

TOKENS = MICRO_BATCH * SEQUENCE
KEYS = gqa(qk_norm=None).model_copy(update={"kv_heads": 4})
ALL = EVERYTHING.model_copy(update={"qk_norm": "head", "kv_heads": 4})
MODELS = {
    "llama": model(gqa(qk_norm=None), Dense(inner=12), Dense(inner=24), mtp=False),
    "keys of each head": model(KEYS, Dense(inner=12), Dense(inner=12), mtp=True),
    "all of attention": model(ALL, Dense(inner=12, activation="relu2"), Dense(inner=24, bias=True), mtp=False),
    "sandwich": model(ALL, Dense(inner=12, activation="geglu_tanh"), Dense(inner=24), mtp=True).model_copy(
        update={"norm": "sandwich", "residual_scale": 0.5, "tied": True, "logit_cap": 2.0, "embedding_scale": 3.0}
    ),
    "streams": model(mla(), Dense(inner=12), Dense(inner=24), mtp=True).model_copy(
        update={"norm": "sandwich", "hyper_connections": HyperConnections(streams=3, rounds=3, eps=1e-3)}
    ),
    "latent": model(mla(), Dense(inner=12), Dense(inner=24), mtp=True),
    "latent of rotated queries": model(
        mla(query_rank=None).model_copy(update={"rope": Rope(theta=100.0, scaling=YARN)}),
        Dense(inner=12),
        Dense(inner=24),
        mtp=False,
    ),
    "post": model(gqa(qk_norm="head"), Dense(inner=12), Dense(inner=24), mtp=False).model_copy(update={"norm": "post"}),
}


def of_ranks(model_spec: Model, ranks: int, vocab: int = 60) -> Spec:
    return spec(1, 1, 1, 3, tensor=ranks).model_copy(update={"model": model_spec.model_copy(update={"vocab": vocab})})


def data_of(chosen: Spec, data: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The tokens that a tensor rank reads: its own rows; for a vocabulary shard all rows, with others' words as −1."""
    ranks = chosen.parallel.tensor
    mine = {name: rows.chunk(ranks)[rank] for name, rows in data.items()}
    if chosen.model.vocab % ranks or ranks == 1:
        return mine
    words = range(chosen.model.vocab)[rank * chosen.model.vocab // ranks :][: chosen.model.vocab // ranks]
    local = {name: torch.tensor([words.index(t) if t in words else -1 for t in data[name].tolist()]) for name in data}
    targets = {f"part_{name}": rows for name, rows in local.items() if name.endswith("targets")}
    tokens = {name: rows for name, rows in local.items() if name.endswith("tokens")}
    return mine | targets | tokens | {"tensor_rank": torch.tensor([rank])}


def loss_of(chosen: Spec, weights: dict[str, Tensor], data: dict[str, Tensor]) -> Tensor:
    """The sum of the losses of all tensor ranks, each with its rows of the data and its slices of the weights."""
    ranks = chosen.parallel.tensor
    values = [data_of(chosen, data, rank) for rank in range(ranks)]
    for step in model_steps(chosen):
        if isinstance(step, ir.Communication):
            operands = [mine[step.inputs[0]] for mine in values]
            together = torch.cat(operands) if step.kind == "gather" else sum(operands[1:], operands[0])
            received = [together] * ranks if step.kind == "gather" else together.chunk(ranks)
            for mine, tensor in zip(values, received, strict=True):
                assert tuple(tensor.shape) == step.outputs[0].shape
                mine[step.outputs[0].name] = tensor
            continue
        for rank, mine in enumerate(values):
            local_weights = {}
            for param, (local, tensor) in zip(step.segment.params, step.params, strict=True):
                local_weights[local] = cut(weights[tensor], param.split.slice_of(rank) if param.split else None)
                assert tuple(local_weights[local].shape) == param.shape
            results = step.segment.function(
                plain, SimpleNamespace(**local_weights), *(mine[name] for name in step.inputs)
            )
            mine |= zip(step.outputs, results, strict=True)
    losses = [mine[name] for mine in values for name in ("loss", "mtp_loss") if name in mine]
    return torch.stack(losses).sum()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("vocab", [60, 61])
@pytest.mark.parametrize("model_spec", MODELS)
def test_all_tensor_ranks_together_equal_the_model(model_spec: str, ranks: int, vocab: int) -> None:
    attention = MODELS[model_spec].attention
    assert isinstance(attention, Mla | Gqa)
    ranks = min(ranks, attention.heads if isinstance(attention, Mla) else attention.kv_heads)
    alone, split = of_ranks(MODELS[model_spec], 1, vocab), of_ranks(MODELS[model_spec], ranks, vocab)
    assert parameters(alone) == parameters(split)
    generator = torch.Generator().manual_seed(ranks)
    weights = {
        row.name: torch.randn(row.shape, generator=generator, dtype=torch.float64).mul_(0.3).requires_grad_()
        for row in tensors(alone, model_steps(alone))
    }
    data = {
        name: torch.randint(-10 if name.endswith("targets") else 0, vocab, (TOKENS,), generator=generator).clamp(min=-1)
        for name in ("tokens", "targets", "mtp_tokens", "mtp_targets")
    }
    results = []
    for chosen in (alone, split):
        loss = loss_of(chosen, weights, data)
        results.append((loss, torch.autograd.grad(loss, list(weights.values()))))
    (alone_loss, wanted), (split_loss, gradients) = results
    assert abs(alone_loss - split_loss) <= 1e-12 * abs(alone_loss)
    for name, a, b in zip(weights, wanted, gradients, strict=True):
        assert (a - b).abs().max() <= 1e-11 * a.abs().max(), name


@pytest.mark.parametrize("model_spec", MODELS)
def test_emitted_parts_equal_autograd(model_spec: str) -> None:
    """F, I and W of every kind of segment of a split model."""
    seen = set()
    for step in model_steps(of_ranks(MODELS[model_spec], 2)):
        if isinstance(step, ir.Use) and step.segment.emitted_key not in seen:
            seen.add(step.segment.emitted_key)
            operands = arguments(step.segment, 30)
            assert_equal(by_segment(step.segment, load(step.segment), operands), by_autograd(step.segment, operands))
            assert interpret(step.segment).recomputed == ()
    ends = {"embed", "final_norm", "head", "loss", *(["mtp_input"] if MODELS[model_spec].mtp else [])}
    ends |= {"streams"} if MODELS[model_spec].hyper_connections else set()
    assert {key[0] for key in seen} == {"enter", "attention", "between", "dense", "leave", *ends}


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_of_tensor_ranks_returns_a_partial_sum(ranks: int) -> None:
    """Each rank has a partial sum, so the residual is added after the reduction; a single rank adds it directly."""
    hybrid = load_spec(
        Path(__file__).parents[4] / "specs" / "laptop-hybrid.dsc", overrides=[f"parallel.tensor={ranks}"]
    )
    uses = [use for stage in make_plan(hybrid).stages for use in stage.steps if isinstance(use, ir.Use)]
    attentions = {use.segment for use in uses if use.segment.kind == "attention"}
    assert len(attentions) > 1
    for segment in attentions:
        joint = interpret(segment)
        makers = {value: node.op for node in joint.nodes for value in node.outputs}
        ops = [makers.get(value, "") for _, value in joint.outputs]
        assert (ops == ["linear"]) == (ranks > 1), ops
