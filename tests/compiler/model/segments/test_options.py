"""Segments of models with other norms, activations and factors, against autograd over plain torch, in float64."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from dsl.schema import Clamp, Dense, Indexer
from dsl.schema.model import Act
from tests.compiler.model.segments.running import assert_equal, by_autograd, by_segment, load
from tests.compiler.model.segments.specs import DENSE, clipped, gqa, mla, moe, padded, spec
from tests.compiler.model.segments.test_segments import SOURCES, arguments, check, segment_of
from tests.runtime.step.specs import with_rewards


@pytest.mark.parametrize("norm", ["post", "sandwich"])
@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_norms_behind_parts(norm: str, factor: float) -> None:
    model_spec, names = spec(norm=norm, residual_scale=factor), ["norm"] if norm == "sandwich" else []
    for segment in (
        segment_of("attention", model_spec),
        segment_of("dense", model_spec, DENSE),
        segment_of("join", model_spec),
    ):
        of_block = ["norm"] if norm == "sandwich" and segment.kind != "join" else []
        assert [param.name for param in segment.params if "norm" in param.name and len(param.name) != 6] == [
            *of_block,
            *(["kv_norm"] if segment.kind == "attention" else []),
            "post_norm",
        ]
        check(segment)
    check(segment_of("attention", spec(attention=gqa(), norm=norm, residual_scale=factor)))
    check(segment_of("join", model_spec, moe(shared=0)))
    router = segment_of("router", model_spec)
    assert [param.name for param in router.params] == [*names, "weight", "bias"]
    check(router)


def test_factors_and_a_bound_at_the_ends() -> None:
    model_spec = spec(embedding_scale=3.5, logit_scale=0.25, logit_cap=0.5)
    for kind in ("embed", "mtp_input", "head"):
        check(segment_of(kind, model_spec))
    plain, scaled = (
        by_segment(s, load(s), arguments(s, 31)) for s in (segment_of("embed", spec()), segment_of("embed", model_spec))
    )
    assert torch.equal(scaled.outputs["y"], 3.5 * plain.outputs["y"])


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_head_that_learns_from_rewards(kl: float, temperature: float) -> None:
    """With any logit scale and cap, the loss and the log-probabilities use the same logits."""
    for keys in ({}, {"logit_scale": 0.6}, {"logit_scale": 0.25, "logit_cap": 0.5}):
        model_spec = with_rewards(spec(mtp=False, **keys), kl=kl, temperature=temperature, clip_high=0.4)
        segment = segment_of("head", model_spec)
        assert [argument.name for argument in segment.inputs][4:] == ["weight", *(["reference"] if kl else [])]
        check(segment)
        operands = arguments(segment, 31)
        scale, cap = keys.get("logit_scale", 1.0), keys.get("logit_cap")
        logits_TV = scale * operands["h"] @ operands["head"].T
        logits_TV = logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)
        targets_T = operands["targets"]
        logp_T = (logits_TV / temperature).log_softmax(dim=1).gather(1, targets_T.clamp(min=0)[:, None])[:, 0]
        output_T = by_segment(segment, load(segment), operands).outputs["logp"]
        torch.testing.assert_close(output_T, logp_T.masked_fill(targets_T < 0, 0), rtol=1e-12, atol=1e-12)


ACTIVATIONS = [{"activation": activation} for activation in get_args(Act) if activation != "swiglu"]
GPT_OSS = Clamp(limit=0.7, alpha=1.702, shift=1.0)
ACTIVATIONS += [{"clamp": GPT_OSS}, {"clamp": Clamp(limit=0.5)}]
BIASED: list[dict[str, Any]] = [{"bias": True}, {"bias": True, "clamp": GPT_OSS}, {"bias": True, "activation": "relu2"}]


@pytest.mark.parametrize("changes", ACTIVATIONS + BIASED, ids=str)
def test_activations_and_biases(changes: dict[str, Any]) -> None:
    """In dense layers, and in shared and routed experts."""
    check(segment_of("dense", spec(), Dense(inner=10, **changes)))
    check(segment_of("shared", spec(), moe(**changes)))
    segment = segment_of("experts", spec(expert=SOURCES), moe(**changes))
    operands = arguments(segment, 31, [3, 0, 4, 1])
    assert_equal(by_segment(segment, load(segment), operands), by_autograd(segment, operands))


def test_biases_are_parameters() -> None:
    """Every product of a feed-forward part has one for each of its columns, and each expert on this rank its own."""
    up, down = 2 * DENSE.inner, 12
    for kind, ffn in (("dense", Dense(inner=10, bias=True)), ("shared", moe(inner=10, bias=True))):
        shapes = {param.name: param.shape for param in segment_of(kind, spec(), ffn).params}
        assert shapes["up_bias"] == (up,) and shapes["down_bias"] == (down,)
    experts = segment_of("experts", spec(expert=SOURCES), moe(inner=10, bias=True))
    (of_up, of_down) = (param for param in experts.params if param.name.endswith("_bias"))
    assert (of_up.shape, of_down.shape) == ((8 // SOURCES, up), (8 // SOURCES, down))
    assert of_up.stack == 8 // SOURCES and not of_up.decay and of_up.init == 0.0


@pytest.mark.parametrize("score", ["sigmoid", "softmax", "sqrt_softplus"])
def test_a_bias_of_the_logits(score: str) -> None:
    """In addition to the balancing bias, which has no gradient."""
    segment = segment_of("router", spec(), moe(score=score, router_bias=True))
    assert [param.name for param in segment.params] == ["norm", "weight", "logit_bias", "bias"]
    assert [param.grad for param in segment.params] == [True, True, True, False]
    check(segment)


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("score", ["sigmoid", "softmax", "sqrt_softplus"])
def test_rows_that_are_padding(score: str, context: int) -> None:
    """Whole sequences, and parts of them on context ranks, which put the counts of choices together."""
    model_spec = padded(spec((moe(score=score),)))
    model_spec = model_spec.model_copy(update={"parallel": model_spec.parallel.model_copy(update={"context": context})})
    for kind in ("router", *(["balance"] if context > 1 else [])):
        segment = segment_of(kind, model_spec)
        assert [argument.name for argument in segment.inputs][-1] == "real"
        check(segment)


def test_padding_in_front_of_attention_with_an_indexer() -> None:
    """The indexer's loss is a sum over all rows. tests/runtime/run checks padding for attention with bounded logits."""
    segment = segment_of("attention", padded(spec(attention=mla(indexer=Indexer(heads=2, head_dim=8, top_k=2)))))
    assert [argument.name for argument in segment.inputs] == ["h", "real"]
    check(segment)
    assert [argument.name for argument in segment_of("attention", padded(clipped(spec()))).inputs] == ["h", "real"]
    assert [argument.name for argument in segment_of("attention", padded(spec())).inputs] == ["h"], (
        "nothing sums over rows"
    )


@pytest.mark.parametrize("changes", [{}, *ACTIVATIONS[1:4:2], *BIASED], ids=str)
def test_shared_experts_behind_a_gate(changes: dict[str, Any]) -> None:
    segment = segment_of("shared", spec(), moe(shared_gate=True, shared_inner=7, **changes))
    params = {param.name: param.shape for param in segment.params}
    biases = ["up_bias", "down_bias"] if "bias" in changes else []
    assert sorted(params) == sorted(["up", "gate", "down", *biases])
    assert params["gate"] == (1, 12) and params["down"] == (12, 7)
    check(segment)
