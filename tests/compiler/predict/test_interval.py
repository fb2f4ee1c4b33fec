"""The interval of a step: what widens it, what narrows it, and how often published steps lie in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log

import pytest

from compiler.machine.rates import Rates
from compiler.machine.rates.table import Point
from compiler.plan.spec_rates import rates_of
from compiler.predict.interval import CONFIDENCE, LEAST, ONE_ROW, UNKNOWN, error_of, interval_of, spread_of
from compiler.predict.predict import interval_of_plan, time_plan
from compiler.predict.prediction import Interval, KernelTime, RankUse
from compiler.predict.rank_use import use_of
from dsl.load import load, resolve
from tests.specs.shipped import SPECS, path_of

PRODUCTS = {"gemm": KernelTime(1.0, 1.0)}
SHAPES = tuple(((4096, width, 4096), 1e14 * factor) for width, factor in ((1024, 1.0), (4096, 1.3), (16384, 1.1)))


def rates_with(points: Mapping[tuple[str, str], tuple[Point, ...]] = {}, **changes: object) -> Rates:
    """The rates of a plain run on H100s, without factors."""
    rates = rates_of(load(SPECS / "llama3-8b.dsc"))
    plain = replace(rates, carried={}, borrowed=frozenset(), is_traced=True, points={**rates.points, **points})
    return replace(plain, **changes)  # type: ignore[arg-type]


def width_of(interval: Interval) -> float:
    return log(interval.high_s / interval.low_s)


def interval(rates: Rates, classes: Mapping[str, KernelTime] = PRODUCTS) -> Interval:
    return interval_of(1.0, RankUse(0, classes, (), 1.0), rates)


def test_errors_of_a_class() -> None:
    measured, one, stand_in = ({("gemm", "bf16"): points} for points in (SHAPES, SHAPES[:1], (((), 1e14),)))
    assert (
        error_of(rates_with(one), "gemm") == pytest.approx((LEAST**2 + ONE_ROW**2) ** 0.5)
        and error_of(rates_with(stand_in), "gemm") == UNKNOWN
    )
    spread = spread_of(SHAPES)
    assert error_of(rates_with(measured), "gemm") == pytest.approx((LEAST**2 + spread**2) ** 0.5)
    several = error_of(rates_with(measured), "gemm", 0.5)
    assert several == pytest.approx((LEAST**2 + spread**2 / 4) ** 0.5), "errors of several shapes are independent"
    assert error_of(rates_with(measured), "gemm", 0.0) == LEAST, "all shapes have rows"
    exact = tuple((shape, 1e14) for shape, _ in SHAPES)
    assert spread_of(exact) == pytest.approx(0) and error_of(rates_with({("gemm", "bf16"): exact}), "gemm") == LEAST


def test_the_width_is_that_of_80_percent_of_a_normal_error() -> None:
    """One class with one row: 80% of a normal distribution lie within 1.2816 standard deviations."""
    alone = interval(rates_with({("gemm", "bf16"): SHAPES[:1]}))
    assert alone.confidence == CONFIDENCE == 0.8
    assert width_of(alone) == pytest.approx(2 * 1.2815516 * log(1 + (LEAST**2 + ONE_ROW**2) ** 0.5))
    assert alone.low_s * alone.high_s == pytest.approx(1.0), "it is as wide on both sides, in logarithms"


def test_classes_of_a_family_err_together_and_families_do_not() -> None:
    rates = rates_with({(kind, "bf16"): SHAPES[:1] for kind in ("gemm", "wgrad", "attention")})
    half = KernelTime(0.5, 1.0)
    whole = width_of(interval(rates))
    assert width_of(interval(rates, {"gemm": half, "wgrad": half})) == pytest.approx(whole)
    assert width_of(interval(rates, {"gemm": half, "attention": half})) == pytest.approx(whole * 0.5**0.5)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"carried": {"gemm": 1.5}}, "of another device"),
        ({"borrowed": frozenset({"gemm"})}, "rates of another device"),
        ({"is_traced": False}, "kernels bound by memory: slowdown"),
    ],
)
def test_what_widens_an_interval_is_named_with_what_its_measurement_gains(change: dict[str, object], word: str) -> None:
    classes = {"gemm": KernelTime(0.6, 1.0), "norm": KernelTime(0.4, 1.0)}
    plain, wide = interval(rates_with(), classes), interval(rates_with(**change), classes)
    assert width_of(wide) > width_of(plain) * 1.01
    cause = next(cause for cause in wide.causes if word in cause.what)
    assert 0 < cause.narrows < 1 and [c.narrows for c in wide.causes] == sorted(c.narrows for c in wide.causes)[::-1]
    assert wide.low_s <= 1 <= wide.high_s


def test_a_slowdown_in_training_only_makes_the_step_longer() -> None:
    classes = {"gemm": KernelTime(0.6, 1.0), "norm": KernelTime(0.4, 1.0)}
    plain, wide = (interval(rates_with(is_traced=traced), classes) for traced in (True, False))
    assert wide.high_s / plain.high_s > plain.low_s / wide.low_s


def test_exchanges_have_the_uncertainty_of_their_links() -> None:
    """Exchanges of tokens, and with tensor ranks sums over them."""
    for name, overrides, kind in (
        ("moe-8gpu", (), "dispatch_node"),
        ("llama3-8b", ("parallel.tensor=2",), "all_reduce_node"),
        ("llama3-8b", ("parallel.pipeline=1", "cluster.nodes=1", "train.batch=64"), "all_reduce_node"),
    ):
        timed = time_plan(resolve(path_of(name), overrides=overrides).spec)
        use, rates = use_of(timed), replace(timed.rates[0], carried={})
        plain = interval_of(1.0, use, rates)
        for other in ("dispatch_node", "all_reduce_node"):
            widened = interval_of(1.0, use, replace(rates, carried={other: 10.0}))
            assert (width_of(widened) > 1.001 * width_of(plain)) == (other == kind), (name, other)


def test_rates_that_were_measured_on_the_device_give_narrow_intervals() -> None:
    for name, overrides in (("deepseek-v3", ()), ("llama3-8b", ()), ("llama3-8b", ("precision=fp8_block",))):
        timed = time_plan(resolve(path_of(name), overrides=overrides).spec)
        measured = interval_of_plan(timed, use_of(timed))
        assert measured is not None and measured.high_s / measured.low_s <= 1.35, (name, overrides)


def test_a_table_of_ones_own_has_the_causes_of_an_unmeasured_training() -> None:
    """Kernels that were measured alone take longer in training, whatever the name of the table."""
    shipped = rates_of(load(SPECS / "llama3-8b.dsc"))
    own = replace(shipped, table="mine")
    timed = time_plan(resolve(path_of("llama3-8b")).spec)
    named, renamed = (interval_of(1.0, use_of(timed), rates) for rates in (shipped, own))
    assert (named.low_s, named.high_s) == (renamed.low_s, renamed.high_s)
    assert any("dsc calibrate SPEC --device" in cause.remedy for cause in named.causes)
    assert not any("dsc calibrate SPEC --device" in cause.remedy for cause in renamed.causes), "it was done"
