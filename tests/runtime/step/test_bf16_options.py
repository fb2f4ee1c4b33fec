"""A BF16 step with every option of a model: the errors of gradients are those of the option's roundings.

As in test_bf16.py, the same step in FP32 is rounded wherever BF16 rounds. Random rounding shows how far such roundings
move a gradient; rounding to nearest gives what BF16 should give, up to the order of sums. Every token goes to every
expert.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, get_args

import pytest
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import Balance, Clamp, Dense, HyperConnections, Model, Moe, Rope
from dsl.schema.model import Act
from dsl.schema.run import Fusion
from tests.compiler.model.segments.rounding import SAMPLES, SPREADS, spread
from tests.runtime.step.rounded_step import first_step
from tests.runtime.step.specs import MODELS, MOE, YARN, gqa, mla, model, spec

MICRO_BATCHES = 8
DENSE = Dense(inner=22)
EVERYONE = {"experts": 4, "top_k": 4, "groups": 1, "top_groups": 1}
APART = 0.75  # relative to the spread; for independent runs that round to nearest, the median would be 1
OFF = 0.25  # minimum error of the median gradient, relative to the spread: it was rounded


def grouped(**changes: Any) -> Model:
    return model(gqa(None).model_copy(update=changes), DENSE, MOE.model_copy(update=EVERYONE), mtp=False)


def latent(**changes: Any) -> Model:
    return model(mla().model_copy(update=changes), DENSE, MOE.model_copy(update=EVERYONE), mtp=False)


def both(**changes: Any) -> Model:
    """Dense layers and experts with the same changes."""
    return experts(DENSE.model_copy(update=changes), **changes)


def experts(dense: Dense = DENSE, **changes: Any) -> Model:
    return model(gqa(None), dense, MOE.model_copy(update=EVERYONE | changes), mtp=False)


def whole(**changes: Any) -> Model:
    return grouped().model_copy(update=changes)


def with_mtp(**changes: Any) -> Model:
    return model(gqa(None), DENSE, MOE.model_copy(update=EVERYONE), mtp=True).model_copy(update=changes)


ROPE = Rope(theta=100.0)
OPTIONS: dict[str, Model] = {
    "bias = qkv": grouped(bias="qkv"),
    "bias = all": grouped(bias="all"),
    "qk_norm = head": grouped(qk_norm="head"),
    "qk_norm = width": grouped(qk_norm="width"),
    "rope = none": grouped(rope=None),
    "rope width": grouped(rope=ROPE.model_copy(update={"width": 4})),
    "yarn": grouped(rope=ROPE.model_copy(update={"scaling": YARN})),
    "window": grouped(window=3),
    "sinks": grouped(sinks=True),
    "softcap": grouped(softcap=1.5),
    "scale": grouped(scale=0.3),
    "query_rank = none": latent(query_rank=None),
    "scale of mla": latent(scale=0.2),
    "yarn of mla": latent(rope=ROPE.model_copy(update={"scaling": YARN})),
    **{f"activation = {activation}": both(activation=activation) for activation in get_args(Act)},
    "clamp": both(clamp=Clamp(limit=0.7)),
    "clamp of gpt-oss": both(clamp=Clamp(limit=0.7, alpha=1.702, shift=1.0)),
    "bias of ffn": both(bias=True),
    "router_bias": experts(router_bias=True),
    "shared_gate": experts(shared=2, shared_inner=7, shared_gate=True),
    "score = softmax": experts(score="softmax", balance=Balance(sequence_loss=0.02)),
    "score = sqrt_softplus": experts(score="sqrt_softplus"),
    "tied": with_mtp(tied=True),
    "norm = post": with_mtp(norm="post"),
    "norm = sandwich": with_mtp(norm="sandwich"),
    "embedding_scale": with_mtp(embedding_scale=4.0),
    "residual_scale": with_mtp(residual_scale=0.22),
    "hyper_connections": with_mtp(hyper_connections=HyperConnections(streams=3)),
    "logit_scale": whole(logit_scale=0.5),
    "logit_cap": whole(logit_cap=2.0),
}


def together(name: str) -> Model:
    """A model with many options, without a clamp: a gradient jumps at its limit, so in a deep model one number rounded
    to the other side outweighs all roundings."""
    base = MODELS[name]
    changes = EVERYONE | {"clamp": None}
    spans = (
        span.model_copy(update={"ffn": span.ffn.model_copy(update=changes)}) if isinstance(span.ffn, Moe) else span
        for span in base.layers
    )
    return base.model_copy(update={"layers": tuple(spans)})


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_differs_from_fp32_by_its_roundings(name: str, segments: Segments, tmp_path: Path) -> None:
    assert_off_by_roundings(OPTIONS[name], segments, tmp_path)


@pytest.mark.parametrize("name", ["everything", "pattern"])
def test_options_together_differ_from_fp32_by_their_roundings(name: str, segments: Segments, tmp_path: Path) -> None:
    assert_off_by_roundings(together(name), segments, tmp_path)


def assert_off_by_roundings(chosen: Model, segments: Segments, folder: Path) -> None:
    """Assert that errors of gradients are like those of random roundings, and most are near rounding to nearest."""
    narrow = spec(1, 1, 1, MICRO_BATCHES, 2, precision="bf16").model_copy(update={"model": chosen})
    wide = spec(1, 1, 1, MICRO_BATCHES, 2, precision="fp32").model_copy(
        update={"model": chosen, "unfused": get_args(Fusion)}  # so that all roundings are between ops
    )
    for variant, name in ((narrow, "narrow"), (wide, "wide")):
        write_build(folder / name, compile_spec(variant, segments=segments).files)
    gradients, exact = first_step(folder / "narrow"), first_step(folder / "wide")
    nearest = first_step(folder / "wide", "nearest")
    samples = [first_step(folder / "wide", seed) for seed in range(SAMPLES)]
    assert gradients.keys() == exact.keys()
    off, apart = [], []
    for name, value in exact.items():
        size = spread([sample[name] for sample in samples], value)
        error, least = distance(gradients[name], value), distance(nearest[name], value)
        narrow_sums = 1e-5 * float(value.double().norm())  # the error of FP32
        assert error <= SPREADS * max(size, least) + narrow_sums, f"{name}: off by {error:.3g}, roundings {size:.3g}"
        if size > 10 * narrow_sums:
            off.append(error / size)
            apart.append(distance(gradients[name], nearest[name]) / size)
    assert len(apart) > len(exact) / 2
    assert median(off) >= OFF and median(apart) <= APART, (median(off), median(apart))


def distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm())
