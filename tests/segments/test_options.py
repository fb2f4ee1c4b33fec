"""Segments of models with other norms, activations and factors, against autograd over plain torch, in float64."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from dsl.schema import Clamp, Dense
from dsl.schema.model import Act
from tests.segments.running import assert_equal, by_autograd, by_segment, load
from tests.segments.specs import DENSE, gqa, moe, spec
from tests.segments.test_segments import SOURCES, arguments, check, segment_of


@pytest.mark.parametrize("norm", ["post", "sandwich"])
@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_norms_behind_parts(norm: str, factor: float) -> None:
    of, names = spec(norm=norm, residual_scale=factor), ["norm"] if norm == "sandwich" else []
    for segment in (segment_of("attention", of), segment_of("dense", of, DENSE), segment_of("join", of)):
        of_block = ["norm"] if norm == "sandwich" and segment.kind != "join" else []
        assert [param.name for param in segment.params if "norm" in param.name and len(param.name) != 6] == [
            *of_block,
            *(["kv_norm"] if segment.kind == "attention" else []),
            "post_norm",
        ]
        check(segment)
    check(segment_of("attention", spec(attention=gqa(), norm=norm, residual_scale=factor)))
    check(segment_of("join", of, moe(shared=0)))
    router = segment_of("router", of)
    assert [param.name for param in router.params] == [*names, "weight", "bias"]
    check(router)


def test_factors_and_a_bound_at_the_ends() -> None:
    of = spec(embedding_scale=3.5, logit_scale=0.25, logit_cap=0.5)
    for kind in ("embed", "mtp_input", "head"):
        check(segment_of(kind, of))
    plain, scaled = (
        by_segment(s, load(s), arguments(s, 31)) for s in (segment_of("embed", spec()), segment_of("embed", of))
    )
    assert torch.equal(scaled.outputs["y"], 3.5 * plain.outputs["y"])


ACTIVATIONS = [{"activation": each} for each in get_args(Act) if each != "swiglu"]
ACTIVATIONS += [{"clamp": Clamp(limit=0.7, alpha=1.702, shift=1.0)}, {"clamp": Clamp(limit=0.5)}]


@pytest.mark.parametrize("changes", ACTIVATIONS, ids=str)
def test_activations(changes: dict[str, Any]) -> None:
    """In dense layers, and in shared and routed experts."""
    check(segment_of("dense", spec(), Dense(inner=10, **changes)))
    check(segment_of("shared", spec(), moe(**changes)))
    segment = segment_of("experts", spec(expert=SOURCES), moe(**changes))
    given = arguments(segment, 31, [3, 0, 4, 1])
    assert_equal(by_segment(segment, load(segment), given), by_autograd(segment, given))


@pytest.mark.parametrize("changes", [{}, *ACTIVATIONS[1:4:2]], ids=str)
def test_shared_experts_behind_a_gate(changes: dict[str, Any]) -> None:
    segment = segment_of("shared", spec(), moe(shared_gate=True, shared_inner=7, **changes))
    assert [param.name for param in segment.params] == ["up", "gate", "down"]
    assert [param.shape for param in segment.params][1:] == [(1, 12), (12, 7)]
    check(segment)
