"""The interval in which a step lies with a confidence of 80%, and what widens it.

The logarithm of the step's time has a normal error. Its causes are independent of each other:

- **Rates of a family of classes**, such as products. The error of one shape is the distance of each row of its class
  from the rate that the others imply for the row's shape (rms of logarithms, weighted by the size of the row). Errors
  of several shapes are independent, so those of a class are smaller, and a shape with a row has none. `LEAST` is added.
  A class with one row, or with the rows of a related class, has the error `ONE_ROW`, and one without rows `UNKNOWN`.
  Rates of another device, as shares of its peaks, add the distance between the shares of devices for which tables have
  rows of their own.
- **Factors that were carried over** from another device. Here they may be absent or twice as large, and anything
  between is as likely.
- **Slowdown in training** of classes whose rates were measured alone, as in the one public profile of training (the
  table `PROFILED`). It only makes a step longer, and a smaller slowdown is more likely.
- **Software**: the same run takes another time with another release of a trainer (`RELEASES`). Where the factors of the
  table come from a profile of training on the device, its software was measured, too.

Classes of a cause err together. The weight of a class is how far the time of the busiest rank follows its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, hypot, log, prod, sqrt
from statistics import NormalDist, fmean

from compiler.machine.rates import Rates, shipped_table, shipped_table_names
from compiler.machine.rates.table import (
    EXCHANGES,
    FLOPS,
    GROUPED,
    LAUNCH,
    LINKS,
    MEMORY,
    SEQUENCES,
    Point,
    RateRow,
    rate_at,
    scale,
)
from compiler.predict.prediction import Cause, Interval
from compiler.predict.rank_use import RankUse

CONFIDENCE = 0.8
LEAST, ONE_ROW, UNKNOWN = 0.05, 0.10, 0.20
# Deviation of the logarithm of tokens/s of one layout over releases 25.09 to 26.08 of Megatron-Bridge, pooled over 24
# layouts of dense models and 43 of models with experts (its performance summary and the archive of it at 067f987).
RELEASES = {False: 0.034, True: 0.123}  # by whether there are expert ranks
MOST_COMPARED = 400  # rows of a class that are compared with all others; of more rows, every k-th is taken
PROFILED, REFERENCE = "h800-calibrated", "h800"


@dataclass(frozen=True, slots=True)
class _Error:
    """An error of the logarithm of a step's time."""

    what: str
    remedy: str
    mean: float
    deviation: float
    remaining: float  # deviation after the remedy


def interval_of(step_s: float, use: RankUse, rates: Rates) -> Interval:
    """The interval of a step whose busiest rank uses its lanes like this."""
    weights = _weights(use)
    errors = [*_of_rates(weights, use, rates), *_of_carried(weights, rates), *_of_training(weights, rates)]
    errors += _of_software(use, rates)
    width = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    mean, deviation = sum(error.mean for error in errors), hypot(*(error.deviation for error in errors))
    without = (hypot(*(e.remaining if e is error else e.deviation for e in errors)) for error in errors)
    causes = [Cause(e.what, e.remedy, 1 - rest / deviation) for e, rest in zip(errors, without, strict=True)]
    causes = sorted((cause for cause in causes if cause.narrows > 0), key=lambda cause: -cause.narrows)
    low_s, high_s = (step_s * exp(mean + sign * width * deviation) for sign in (-1, 1))
    return Interval(min(step_s, low_s), max(step_s, high_s), CONFIDENCE, tuple(causes))


# --- weights


def _weights(use: RankUse) -> dict[str, float]:
    """The share of each class, of kernels or of links, in the time of the rank: how far it follows theirs."""
    compute_s = sum(kernels.seconds for kernels in use.classes.values())
    of_links = sum(axis.slope_s for axis in use.axes) / use.seconds
    weights = {kind: (1 - of_links) * time.seconds / compute_s for kind, time in use.classes.items()}
    for axis in use.axes:
        weights[axis.kind] = weights.get(axis.kind, 0.0) + axis.slope_s / use.seconds
    return weights


FAMILIES = {  # classes whose rates err together, because one library or one network runs all of them
    "products": ("gemm", "wgrad"),
    "grouped products": GROUPED,
    "attention": SEQUENCES,
    "exchanges of experts": EXCHANGES,
    "sums and messages": tuple(kind for kind in LINKS if kind not in EXCHANGES),
    "launches": (LAUNCH,),
    "kernels bound by memory": (*MEMORY, "optimizer"),
}
CALIBRATED = ("products", "grouped products", "attention", "kernels bound by memory")  # by `dsc calibrate`


def _family(kind: str) -> str:
    return next(family for family, kinds in FAMILIES.items() if kind in kinds)


# --- causes


def _of_rates(weights: Mapping[str, float], use: RankUse, rates: Rates) -> Iterable[_Error]:
    deviations, remaining, borrowed = defaultdict[str, float](float), defaultdict[str, float](float), set[str]()
    for kind, weight in weights.items():
        family = _family(kind)
        error = error_of(rates, kind, use.classes[kind].guessed if kind in use.classes else 1.0)
        if kind in rates.borrowed:
            error = hypot(error, error_between_devices())
            borrowed.add(family)
        # What a table of one's own leaves. Launches are not measured, and such a table cannot be bettered.
        is_best = rates.table not in shipped_table_names() or kind == LAUNCH
        deviations[family] += weight * log(1 + error)
        remaining[family] += weight * log(1 + (error if is_best else LEAST))
    for family, deviation in deviations.items():
        what = f"{family}: rates of another device" if family in borrowed else f"{family}: rates"
        yield _Error(what, CALIBRATE if family in CALIBRATED else NETWORK, 0.0, deviation, remaining[family])


def _of_carried(weights: Mapping[str, float], rates: Rates) -> Iterable[_Error]:
    sizes = defaultdict[str, float](float)
    for kind, weight in weights.items():
        sizes["exchanges" if kind in LINKS else "products"] += weight * (1 - 1 / rates.carried.get(kind, 1.0))
    for classes, size in sizes.items():
        # Anything between no slowdown and twice as much is as likely: an error of up to `size`, either way.
        yield _Error(f"{classes}: slowdown in training, of another device", TRACE, 0.0, size / sqrt(3), size * LEAST)


def _of_training(weights: Mapping[str, float], rates: Rates) -> Iterable[_Error]:
    factors, sizes = slowdowns(rates), defaultdict[str, float](float)
    for kind, weight in weights.items():
        sizes[_family(kind)] += weight * max(0.0, factors.get(kind, 1.0) - 1)
    for family, size in sizes.items():
        # A triangular distribution that falls from no slowdown to all of it.
        what = f"{family}: slowdown in training, unmeasured"
        yield _Error(what, TRACE, size / 3, size / sqrt(18), size * LEAST)


def _of_software(use: RankUse, rates: Rates) -> Iterable[_Error]:
    if not rates.is_traced and rates.cores is None:
        exchanges = any(axis.axis == "experts" for axis in use.axes)
        yield _Error("software: releases of one trainer differ", MEASURE, 0.0, RELEASES[exchanges], 0.0)


MEASURE = "some steps of `dsc train` on a few of the devices"
CALIBRATE = "`dsc calibrate SPEC --device cuda -o rates.json`"
NETWORK = "rows of your network and transport in a rate table (docs/rates.md)"
TRACE = "`dsc calibrate SPEC --trace FILE`, from a profile of one layer in training"


# --- errors of classes


def error_of(rates: Rates, kind: str, guessed: float = 1.0) -> float:
    """The error of the rate of a class, as a share of its time. `guessed`: of `KernelTime`."""
    dtypes = tuple(dict.fromkeys((rates.linear, rates.plain, "any")))
    points = next((rates.points[kind, dtype] for dtype in dtypes if (kind, dtype) in rates.points), ())
    if kind == LAUNCH or not points:
        return UNKNOWN
    if not all(shape for shape, _ in points):
        related = (rates.points.get((name, dtype), ()) for name in FAMILIES[_family(kind)] for dtype in dtypes)
        return ONE_ROW if any(shape for rows in related for shape, _ in rows) else UNKNOWN
    return hypot(LEAST, guessed * (spread_of(points) if len(points) > 1 else ONE_ROW))


def spread_of(points: Sequence[Point]) -> float:
    """How far the rate of each of several rows is from the one that the others imply, weighted by the size of its
    shape."""
    points = points[:: -(-len(points) // MOST_COMPARED)]
    squares = whole = 0.0
    for index, (shape, rate) in enumerate(points):
        size = float(prod(shape))
        squares += size * log(rate_at([*points[:index], *points[index + 1 :]], shape) / rate) ** 2
        whole += size
    return exp(sqrt(squares / whole)) - 1


def _points(rows: Iterable[RateRow], kind: str, dtype: str) -> list[Point]:
    return [(row.shape, row.rate) for row in rows if (row.kind, row.dtype) == (kind, dtype) and row.rate is not None]


@cache
def error_between_devices() -> float:
    """How much shares of peaks differ between devices: rms over the classes of kernels of which two shipped tables have
    rows."""
    reference, deviations = shipped_table(REFERENCE), list[float]()
    seen = set(reference.rows)
    tables = (shipped_table(name) for name in shipped_table_names())
    for table in (table for table in tables if table.device.bf16 and table.device != reference.device):
        own = [row for row in table.rows if row.scaled_from is None and row not in seen]
        seen.update(own)
        for kind, dtype in dict.fromkeys((row.kind, row.dtype) for row in own if row.kind in (*FLOPS, *MEMORY)):
            points, others = (_points(rows, kind, dtype) for rows in (own, reference.rows))
            share = scale(kind, dtype, reference.device, table.device)
            logs = [log(rate / share / rate_at(others, shape)) for shape, rate in points if others]
            deviations += [fmean(logs)] if logs else []
    return exp(sqrt(sum(deviation**2 for deviation in deviations) / len(deviations))) - 1


def slowdowns(rates: Rates) -> dict[str, float]:
    """How much longer classes took in a profile of training, for classes without a factor that were measured alone."""
    if rates.is_traced or rates.cores is not None:
        return {}
    return {
        factor.kind: factor.factor for factor in shipped_table(PROFILED).factors if factor.kind not in rates.carried
    }
