"""Calibration on one traced layer: the shipped trace of DeepSeek's public profile, and traces of a user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiler.machine.rates import RateError, RateTable, shipped_table
from compiler.machine.rates.table import TABLES, merge_base, table_of_json
from compiler.plan.spec_rates import rates_of
from compiler.predict.traced_layer import (
    TRACES,
    LayerTimes,
    TracedPair,
    calibrate_table,
    layer_times,
    read_trace,
    shipped_trace,
    uncalibrated_classes,
)
from tests.compiler.program.lower.stages import deepseek_v3
from tests.specs.shipped import shipped

V3 = ("deepseek-v3.dsc", "pretrain")
LAYERS = 4


def factors_of(trace: TracedPair) -> RateTable:
    plan = deepseek_v3().plan
    cuts = plan.cuts
    return calibrate_table(shipped_table("h800"), trace, shipped(*V3), plan, cuts)


def times(table: RateTable) -> LayerTimes:
    plan = deepseek_v3().plan
    cuts = plan.cuts
    return layer_times(plan, cuts, rates_of(shipped(*V3), table), "L10")


def test_the_published_figures_agree_with_each_other() -> None:
    """The parts of a layer are a quarter of the published lanes of 4 layers (compiler/schedule/tables); the classes sum
    up the busy time. The parts are 6% longer than the classes, as they include waiting."""
    trace = shipped_trace("deepseek-pair")
    lanes = json.loads((TABLES.parents[2] / "schedule/tables/deepseek-v3-high.json").read_text("utf-8"))["lanes"]
    for phase in "FIW":
        parts = sum(part.ms for part in trace.parts if part.phase == phase)
        assert LAYERS * parts == pytest.approx(lanes["compute"][phase], rel=0.02)
    for phase, name in (("F", "F"), ("I", "B")):
        exchanged = sum(exchange.ms for exchange in trace.exchanges if exchange.phase == phase)
        assert LAYERS * exchanged == pytest.approx(lanes["communication"][name], rel=0.01)
    busy = LAYERS * sum(entry.ms for entry in trace.classes)
    assert busy == pytest.approx(trace.busy_ms, rel=0.01)
    assert LAYERS * sum(part.ms for part in trace.parts) == pytest.approx(busy, rel=0.07)


def test_a_calibrated_table_gives_the_trace_back() -> None:
    trace = shipped_trace("deepseek-pair")
    table = merge_base(factors_of(trace))
    prediction = times(table)
    for entry in trace.classes:
        assert sum(prediction.classes.get(kind, 0.0) for kind in entry.classes) == pytest.approx(
            entry.ms * 1e-3, rel=3e-3
        )
    assert sum(prediction.exchanges.values()) == pytest.approx(28.3e-3, rel=1e-3)
    norm = prediction.moved_bytes["norm"] / prediction.classes["norm"]
    assert norm / 3.35e12 == pytest.approx(0.30, rel=1e-3)
    launch = next(row.seconds for row in table.rows if row.kind == "launch")
    assert launch is not None and launch * prediction.launches * LAYERS == pytest.approx(1.8e-3, rel=1e-3)


def test_phases_not_used_for_calibration_are_predicted() -> None:
    """Factors belong to classes; the times of forward, backward and weight gradients are then predictions."""
    trace = shipped_trace("deepseek-pair")
    prediction = times(merge_base(factors_of(trace)))
    for phase in "FIW":
        predicted = sum(time_s for (part_phase, _), time_s in prediction.parts.items() if part_phase == phase)
        assert predicted == pytest.approx(sum(p.ms for p in trace.parts if p.phase == phase) * 1e-3, rel=0.1)


def test_the_shipped_calibrated_table_follows_from_the_shipped_trace(bless: bool) -> None:
    calibrated_table, path = factors_of(shipped_trace("deepseek-pair")).to_json(), TABLES / "h800-calibrated.json"
    if bless:
        path.write_text(calibrated_table, "utf-8")
    assert path.read_text("utf-8") == calibrated_table, "the ops of a layer have changed: pytest --bless"


def test_no_step_is_an_input() -> None:
    """Nothing of the published step (19.926 s; 1F 1.13, bubble 2.06, …) is in tables or traces."""
    for path in (*TABLES.glob("*.json"), *TRACES.glob("*.json")):
        text = path.read_text("utf-8")
        assert not any(figure in text for figure in ("19.926", "13.95", "19926", "180K"))


def document(**changes: object) -> dict[str, object]:
    return json.loads((TRACES / "deepseek-pair.json").read_text("utf-8")) | changes


def test_a_trace_of_twice_the_time_has_twice_the_factors() -> None:
    once, measured = factors_of(shipped_trace("deepseek-pair")), document(shares=[])
    doubled = measured | {
        "classes": [entry | {"ms": 2 * entry["ms"]} for entry in measured["classes"]],  # type: ignore[attr-defined]
        "busy_ms": 248.6,
        "span_ms": 260.0,
    }
    twice = factors_of(TracedPair.model_validate_json(json.dumps(doubled)))
    assert twice.factor_of("gemm", "e4m3") == pytest.approx(2 * once.factor_of("gemm", "e4m3"), rel=1e-3)
    assert twice.factor_of("gemm", "bf16") == 1, "what was traced ran in FP8"
    assert twice.factor_of("norm") == twice.factor_of("add") > 1, "without shares, all of an entry alike"


def test_classes_missing_in_a_trace_are_listed() -> None:
    """A dense layer runs no experts, and exchanges nothing with them."""
    plan = deepseek_v3().plan
    cuts = plan.cuts
    spec = shipped(*V3)

    def left(trace: TracedPair) -> tuple[str, ...]:
        return uncalibrated_classes(calibrate_table(shipped_table("h800"), trace, spec, plan, cuts), spec, plan, cuts)

    assert left(shipped_trace("deepseek-pair")) == ("copy",), "the trace does not name it"
    dense = left(TracedPair.model_validate_json(json.dumps(document(layer="L0"))))
    assert dense == ("grouped_gemm", "copy", "dispatch_network", "combine_network")


def test_a_calibrated_table_with_a_long_name_reads_back() -> None:
    plan = deepseek_v3().plan
    cuts = plan.cuts
    table = shipped_table("h800").model_copy(update={"name": "x" * 500})
    changed = calibrate_table(table, shipped_trace("deepseek-pair"), shipped(*V3), plan, cuts)
    assert table_of_json(changed.to_json(), "t.json") == changed and changed.name.endswith("x-calibrated")
    launch, *factor_rows = changed.rows
    assert launch.kind == "launch" and factor_rows == [row for row in table.rows if row.kind != "launch"] != [
        *table.rows
    ]
    kinds = [(factor.kind, factor.dtype) for factor in changed.factors]
    assert len({*kinds}) == len(kinds) and {(factor.kind, factor.dtype) for factor in table.factors} <= {*kinds}


WRONG = {
    "sum": (document(busy_ms=90.0), "the classes sum to 123.3 ms for 4 layers, but busy_ms = 90.0"),
    "span": (document(span_ms=125.0), "busy_ms and gaps_ms add up to more than span_ms"),
    "class": (document(shares=[{"class": "launch", "share": 0.5}]), "there is no kernel class 'launch'"),
    "share": (document(shares=[{"class": "copy", "share": 0.5}]), "`shares` has copy, and no entry"),
    "layer": (document(layer="10"), "layer: string should match pattern"),
    "key": (document(step_ms=1.0), "step_ms: extra inputs are not permitted"),
    "phase W": (
        document(exchanges=[{"phase": "W", "ms": 1.0}]),
        "`exchanges` may have one time for phase F and one for phase I",
    ),
    "phase twice": (document(exchanges=[{"phase": "F", "ms": 1.0}] * 2), "`exchanges` may have one time for phase F"),
    "exchange of a part": (document(exchanges=[{"phase": "F", "part": "mlp", "ms": 1.0}]), "without parts"),
    "steers the terminal": (document(name="a\x1b[2J"), "name: it has characters that cannot be printed"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_an_invalid_trace_is_reported_at_its_key(case: str, tmp_path: Path) -> None:
    trace_document, message = WRONG[case]
    (tmp_path / "t.json").write_text(json.dumps(trace_document), "utf-8")
    with pytest.raises(RateError) as caught:
        read_trace(tmp_path / "t.json", "t.json")
    assert str(caught.value).startswith("t.json: ") and message in str(caught.value)


def test_a_trace_that_does_not_fit_its_spec() -> None:
    with pytest.raises(RateError, match="no layer L99"):
        factors_of(TracedPair.model_validate_json(json.dumps(document(layer="L99"))))
    for factor, message in ((1e4, r"gemm takes 1.13e\+04 times as"), (1e-9, "gemm takes 1.13e-09 times as")):
        classes = [{"classes": ["gemm"], "ms": 4.7 * factor}]
        measured = document(classes=classes, shares=[], layers=1, busy_ms=4.7 * factor, span_ms=5e4, gaps_ms=0.0)
        with pytest.raises(RateError, match=message):
            factors_of(TracedPair.model_validate_json(json.dumps(measured)))
    with pytest.raises(RateError, match=r"pair takes .* as the table says, which is not between 0.001 and 1000:"):
        factors_of(TracedPair.model_validate_json(json.dumps(document(span_ms=1e6))))
    with pytest.raises(RateError, match="its exchanges are shorter than their latency"):
        factors_of(TracedPair.model_validate_json(json.dumps(document(exchanges=[{"phase": "F", "ms": 1e-9}]))))
    tiny = [{"class": "norm", "share": 0.001}]
    with pytest.raises(RateError, match="the shares of norm leave no time"):
        factors_of(TracedPair.model_validate_json(json.dumps(document(shares=tiny))))
