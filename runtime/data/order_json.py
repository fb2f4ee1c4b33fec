"""Parse the orders of samples in checkpoints. All functions raise ValueError for invalid JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from runtime.data.blend import MAX_PERIOD, Blend, SourceShare
from runtime.data.cuts import MAX_CUTS, EpochCut, Ranges
from runtime.data.order import Order

MAX_RANGES = 10_000
_MAX = 1 << 62


def ranges(value: Any) -> Ranges:
    """Parse ranges of samples, which are ascending and disjoint."""
    demand(isinstance(value, list) and len(value) <= MAX_RANGES)
    demand(all(isinstance(pair, list) and len(pair) == 2 for pair in value))
    pairs = tuple((count(first), count(end)) for first, end in value)
    demand(all(first < end for first, end in pairs) and all(a[1] <= b[0] for a, b in pairwise(pairs)))
    return pairs


def cuts(value: Any) -> tuple[EpochCut, ...]:
    """Parse the cuts of one epoch."""
    demand(isinstance(value, list) and len(value) <= MAX_CUTS)
    parsed = tuple(map(_cut, value))
    demand(all(cut.epoch == parsed[0].epoch for cut in parsed))
    return parsed


def _cut(value: Any) -> EpochCut:
    demand(isinstance(value, dict) and value.keys() == {"order", "epoch", "next", "skip"})
    return EpochCut(_order(value["order"]), count(value["epoch"]), count(value["next"]), ranges(value["skip"]))


def order(value: Any) -> Order | Blend:
    """Parse an order of samples, of one source or several."""
    return blend(value) if isinstance(value, Mapping) and "shares" in value else _order(value)


def blend(value: Mapping[str, Any]) -> Blend:
    """Parse the order of samples of several sources."""
    demand(value.keys() == {"shares", "first", "samples", "phase"} and isinstance(value["shares"], list))
    shares = tuple(map(_share, value["shares"]))
    demand(len({share.name for share in shares}) == len(shares) and 0 < sum(s.weight for s in shares) <= MAX_PERIOD)
    samples = None if value["samples"] is None else count(value["samples"])
    return Blend(shares, count(value["first"]), samples, count(value["phase"]))


def _share(value: Any) -> SourceShare:
    demand(isinstance(value, Mapping) and value.keys() == {"name", "weight", "order", "first", "cuts"})
    demand(isinstance(value["name"], str))
    source_order = _order(value["order"], least=0)  # a phase draws nothing from a source with weight 0
    return SourceShare(value["name"], count(value["weight"]), source_order, count(value["first"]), cuts(value["cuts"]))


def _order(value: Any, least: int = 1) -> Order:
    plain, of_phase = ("sequence", "windows", "seed"), ("piece", "first")
    demand(isinstance(value, Mapping) and value.keys() in ({*plain}, {*plain, *of_phase, "end"}))
    parsed = Order(*(count(value[name]) for name in plain))
    demand(parsed.sequence > 0 and parsed.windows > 0)
    if "piece" not in value:
        return parsed
    piece, first = (count(value[name]) for name in of_phase)
    end = None if value["end"] is None else count(value["end"])
    demand(piece > 0 and piece % parsed.sequence == 0 and parsed.windows % (piece // parsed.sequence) == 0)
    demand(first % piece == 0 and (end is None or (end >= first + least and end % piece == 0)))
    return replace(parsed, piece=piece, first=first, end=end)


def count(value: Any) -> int:
    """Parse a non-negative integer."""
    demand(type(value) is int and 0 <= value <= _MAX)
    return int(value)


def demand(condition: bool) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError("is no position in the data")
