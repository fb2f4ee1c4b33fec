"""Weights of stages: the factors between the times of a stage's actions and those of the costs, by kind.

The ratio of W to I differs between a stage with the head and one with only layers, so a single factor is not enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from runtime.contract.actions import KINDS

_MOST_WEIGHTS = 4096


class Weight(NamedTuple):
    """Factors of the times of the four kinds of actions. `label`: of a stage in `StagePairs`; 0 for other stages."""

    F: Fraction
    B: Fraction
    I: Fraction
    W: Fraction
    label: int = 0

    @staticmethod
    def of_factors(factors: Iterable[Fraction], label: int = 0) -> Weight:
        """The weight of factors in the order of KINDS."""
        F, B, I, W = factors
        return Weight(F, B, I, W, label)

    @property
    def factors(self) -> tuple[Fraction, Fraction, Fraction, Fraction]:
        """The factors in the order of KINDS."""
        return self.F, self.B, self.I, self.W

    @staticmethod
    def even(factor: Fraction) -> Weight:
        """Weight with one factor for all kinds."""
        return Weight(factor, factor, factor, factor)

    def factor(self, kind: str) -> Fraction:
        """The factor of a kind."""
        return self.factors[KINDS.index(kind)]

    def scale_by(self, scale: Fraction) -> Weight:
        """The weight with all factors multiplied by `scale`."""
        return self if scale == 1 else Weight.of_factors((factor * scale for factor in self.factors), self.label)


Side = tuple[str, int]  # an action of a pair: its kind, and the label of its stage


@dataclass(frozen=True)
class StagePairs:
    """Times of pairs of labelled stages, as shares of the time of their two actions in turn. A share may be above 1."""

    shares: tuple[tuple[Side, Side, Fraction], ...] = ()

    @cached_property
    def _share(self) -> dict[tuple[Side, Side], Fraction]:
        return {sides: share for a, b, share in self.shares for sides in ((a, b), (b, a))}

    def share(self, a: Side, b: Side) -> Fraction:
        """The share of a pair; 1 if it is unknown."""
        return self._share.get((a, b), Fraction(1))

    def least(self, kind: str, label: int | None = None) -> Fraction:
        """The least share of a pair with an action of a kind, on stages of a label or on any."""
        sides = ((side, share) for a, b, share in self.shares for side in (a, b))
        matching = (share for (k, side_label), share in sides if k == kind and label in (None, side_label))
        return min(matching, default=Fraction(1))

    @property
    def gains(self) -> frozenset[str]:
        """The kinds of pairs that gain on some stages, with kinds in alphabetical order."""
        return frozenset("".join(sorted(a[0] + b[0])) for a, b, share in self.shares if share < 1)


NO_PAIRS = StagePairs()
StageWeight = Fraction | Weight  # one factor for all kinds of a stage, or one for each
ONE = Weight.even(Fraction(1))


def as_weight(weight: StageWeight) -> Weight:
    """The factors of a stage, kind by kind."""
    return weight if isinstance(weight, Weight) else Weight.even(weight)


def round_weights(weights: Sequence[StageWeight], parts: int) -> tuple[StageWeight, ...]:
    """The weights rounded to multiples of 1 / `parts`, at least 1 / `parts` each."""

    def of_one(factor: Fraction) -> Fraction:
        return Fraction(max(1, round(parts * factor)), parts)

    return tuple(
        Weight.of_factors(map(of_one, weight.factors), weight.label) if isinstance(weight, Weight) else of_one(weight)
        for weight in weights
    )


def cut_anew(weights: Sequence[StageWeight], num_stages: int) -> tuple[StageWeight, ...]:
    """The weights of the same model in `num_stages` stages: each the mean of the old stages that it overlaps with.

    They have no labels, as their pairs are unknown.
    """
    ratio = Fraction(len(weights), num_stages)
    spans = [(ratio * k, ratio * (k + 1)) for k in range(num_stages)]
    factors = [weight for weight in weights if isinstance(weight, Fraction)]
    if len(factors) == len(weights):
        return tuple(_mean(factors, *span) for span in spans)
    columns = [*zip(*(as_weight(weight).factors for weight in weights), strict=True)]
    return tuple(Weight.of_factors(_mean(column, *span) for column in columns) for span in spans)


def _mean(factors: Sequence[Fraction], start: Fraction, end: Fraction) -> Fraction:
    """The mean of factors over [start, end), if the k-th factor holds over [k, k + 1)."""
    bounds = [(max(start, Fraction(k)), min(end, Fraction(k + 1))) for k in range(len(factors))]
    parts = (factor * (b - a) for factor, (a, b) in zip(factors, bounds, strict=True) if a < b)
    return sum(parts, Fraction(0)) / (end - start)


# ---------------------------------------------------------------- reading


def parse_weights(values: Sequence[object], key: str) -> tuple[Fraction, ...]:
    """Parse a JSON list of factors. Raises ValueError."""
    factors = tuple(value for value in values if isinstance(value, Fraction) and value)
    if len(values) > _MOST_WEIGHTS or len(factors) < len(values):
        raise ValueError(f'"{key}" must be a list of at most {_MOST_WEIGHTS} numbers above 0')
    return factors


def parse_stage_weights(values: Sequence[object], lone_times: Mapping[str, Fraction]) -> tuple[StageWeight, ...]:
    """Parse the weights of stages: a number for each, or an object with a number by kind.

    A kind that an object leaves out has the factor 1, and B the mean of its I and W. `lone_times`: times of F, I and W
    at weight 1. Raises ValueError with the mistake.
    """
    if len(values) > _MOST_WEIGHTS:
        raise ValueError(f'"stages" must be a list of at most {_MOST_WEIGHTS} weights')
    return tuple(_stage_weight(value, lone_times) for value in values)


def _stage_weight(value: object, lone_times: Mapping[str, Fraction]) -> StageWeight:
    if isinstance(value, Fraction) and value:
        return value
    factors = value if isinstance(value, dict) else {}
    valid = {*factors} <= {*KINDS} and all(isinstance(factor, Fraction) for factor in factors.values())
    if not factors or not valid or not factors.get("F", 1) or not factors.get("B", 1):
        raise ValueError(
            '"stages" must have numbers above 0, or objects of F, I, W and B by stage, such as {"F": 1.3, "W": 1.8}'
        )
    F, I, W = (factors.get(kind, Fraction(1)) for kind in "FIW")
    split = lone_times["I"] + lone_times["W"]
    halves = (lone_times["I"] * I + lone_times["W"] * W) / split if split else Fraction(1)
    B = factors.get("B", halves)
    if not B:
        raise ValueError('"stages" has a stage whose I and W take nothing: give one of them a weight above 0')
    return Weight(F, B, I, W)
