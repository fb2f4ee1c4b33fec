"""Attention with an indexer against autograd over plain torch, in float64, and which loss trains which of the two."""

from __future__ import annotations

from typing import Any

import pytest

from compiler.model.segments.interpret import cut
from dsl.schema import Indexer, LinearScaling, Rope, Spec
from tests.compiler.model.segments.running import by_segment, load
from tests.compiler.model.segments.specs import mla, spec
from tests.compiler.model.segments.test_segments import arguments, check, segment_of

INDEXER = Indexer(heads=2, head_dim=6, top_k=3)
OURS = ("index_q", "index_k", "index_norm", "index_bias", "index_weights")


def sparse(**changes: Any) -> Spec:
    return spec(attention=mla(indexer=INDEXER), sequence=8).model_copy(update=changes)


def dense() -> Spec:
    """The phase in which only the indexer is trained."""
    return sparse(train=sparse().train.model_copy(update={"only": "indexer"}))


@pytest.mark.parametrize("model_spec", [sparse(), dense()], ids=["sparse", "dense"])
def test_equals_autograd(model_spec: Spec) -> None:
    check(segment_of("attention", model_spec))


@pytest.mark.parametrize("names", [("rmsnorm",), ("mla_up",), ("rmsnorm", "mla_up"), ("attention",)], ids=str)
def test_recomputation_changes_no_result(names: tuple[str, ...]) -> None:
    plain, again = (segment_of("attention", sparse(recompute=recompute)) for recompute in ((), names))
    assert cut(again).saved != cut(plain).saved
    check(again)


def test_the_indexer_rotates_as_attention_does() -> None:
    rope = Rope(theta=100.0, scaling=LinearScaling(factor=3.0))
    check(segment_of("attention", spec(attention=mla(indexer=INDEXER, rope=rope, scale=0.3), sequence=8)))
    check(segment_of("attention", spec(attention=mla(indexer=INDEXER, rope=None), sequence=8)))


def test_attention_and_indexer_do_not_train_each_other() -> None:
    """The indexer's loss gives gradients only to the indexer, and the attention's output gives it none."""
    segment = segment_of("attention", sparse())
    operands = arguments(segment, 31)
    operands |= {name: tensor * 0 for name, tensor in operands.items() if name.startswith("g_")}
    everything = {param.name for param in segment.params}
    for zeros, wanted in ((("d_y", "d_entered"), {*OURS}), (("d_index_loss",), everything - {*OURS})):
        gradients = by_segment(
            segment, load(segment), operands | {name: operands[name] * 0 for name in zeros}
        ).gradients
        assert {
            name.removeprefix("g_") for name, gradient in gradients.items() if name[:2] == "g_" and gradient.any()
        } == wanted
        assert gradients["d_h"].any() == ("d_y" not in zeros)


def test_only_the_indexer_is_trained() -> None:
    segment = segment_of("attention", dense())
    assert [param.name for param in segment.params if param.grad] == [*OURS]
    assert {param.role for param in segment.params if not param.grad} == {"still"}
    assert not any(param.grad for param in segment_of("dense", dense(), dense().model.layers[0].ffn).params)
