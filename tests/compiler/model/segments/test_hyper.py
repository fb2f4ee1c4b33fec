"""Segments of models with several residual streams, against autograd over plain torch, in float64."""

from __future__ import annotations

import pytest

from compiler.model.segments.interpret import cut, interpret
from dsl.schema import HyperConnections
from tests.compiler.model.segments.specs import DENSE, gqa, moe, spec
from tests.compiler.model.segments.test_recompute import again, names_of, segments
from tests.compiler.model.segments.test_segments import check, segment_of

STREAMS = HyperConnections(streams=3, rounds=4, eps=1e-3)


@pytest.mark.parametrize("norm", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_equals_autograd(norm: str, factor: float) -> None:
    model_spec = spec(norm=norm, residual_scale=factor, hyper_connections=STREAMS)
    for kind, ffn in (
        ("attention", moe()),
        ("dense", DENSE),
        ("router", moe()),
        ("join", moe()),
        ("final_norm", moe()),
    ):
        check(segment_of(kind, model_spec, ffn))
    for kind in ("router", "join"):
        check(segment_of(kind, model_spec, moe(shared=0)))


def test_ends_and_grouped_queries() -> None:
    model_spec = spec(attention=gqa(), hyper_connections=STREAMS)
    for kind in ("attention", "streams", "mtp_input"):
        check(segment_of(kind, model_spec))
    inside, main = segment_of("final_norm", model_spec, mtp=True), segment_of("final_norm", model_spec)
    assert [output.name for output in main.outputs] == ["y", "y_mtp"] and len(inside.outputs) == 1
    assert cut(main).outputs[1].alias == "h", "MTP reads the streams as they are"
    check(inside)


def test_widths() -> None:
    """A segment takes and returns three streams of width 12; values in between have width 12."""
    model_spec = segments(spec(hyper_connections=STREAMS))
    assert {argument.name: argument.shape[1] for argument in model_spec["join"].inputs if argument.name != "order"} == {
        "h": 36, "shared": 12, "rows": 12, "post": 3, "comb": 9,
    }  # fmt: skip
    assert {buffer.name: buffer.shape[1] for buffer in cut(model_spec["attention"]).outputs} == {
        "entered": 36, "y": 12, "next_post": 3, "next_comb": 9,
    }  # fmt: skip
    assert dict((p.name, p.shape) for p in model_spec["attention"].params[:3]) == {
        "hyper_fn": (15, 36), "hyper_base": (15,), "hyper_scale": (3,),
    }  # fmt: skip
    assert model_spec["attention"].params[0].matrices == (3, 3, 9) and model_spec["final_norm"].params[0].matrices == ()


def test_values_saved_with_and_without_recomputation() -> None:
    """A mixing keeps its logits and no round; with `hyper` it keeps nothing, for the streams are there."""
    model_spec = spec(layers=(DENSE, moe()), hyper_connections=STREAMS)
    plain, recomputed = (segments(again(model_spec, *names)) for names in ((), ("hyper",)))
    for kind in ("attention", "router", "dense", "final_norm"):
        saved, fewer = (names_of(cut(by_kind[kind]).saved) for by_kind in (plain, recomputed))
        mixing = {name for name in saved if name.startswith(("hyper_", "add_bias", "scale_parts"))}
        assert mixing >= {"hyper_products_0", "hyper_products_0_rstd", "add_bias_0"}
        assert saved - fewer >= mixing - {"hyper_products_0_rstd"} and fewer <= saved, kind
        assert interpret(recomputed[kind]).recomputed
    assert "hyper_add_0" in names_of(cut(plain["dense"]).saved), "the sum inside of a dense layer"
    assert [remade.value for kind in ("router", "join") for remade in recomputed[kind].remade] == ["residual", "h"]
    of_join = {*cut(recomputed["join"]).I.args}
    assert of_join >= {"stream", "attended", "attended_post", "attended_comb"} and "h" not in of_join
    assert "h" in cut(plain["join"]).I.args and "residual" not in cut(recomputed["router"]).I.args
