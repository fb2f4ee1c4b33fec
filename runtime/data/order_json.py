"""Orders of samples, as checkpoints hold them, from JSON. Each raises ValueError for anything else."""

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
    """Ranges of samples from JSON, ascending and apart. ValueError for anything else."""
    demand(isinstance(value, list) and len(value) <= MAX_RANGES)
    demand(all(isinstance(each, list) and len(each) == 2 for each in value))
    found = tuple((count(first), count(end)) for first, end in value)
    demand(all(first < end for first, end in found) and all(a[1] <= b[0] for a, b in pairwise(found)))
    return found


def cuts(value: Any) -> tuple[EpochCut, ...]:
    """What was drawn of one epoch under earlier orders."""
    demand(isinstance(value, list) and len(value) <= MAX_CUTS)
    found = tuple(map(_cut, value))
    demand(all(each.epoch == found[0].epoch for each in found))
    return found


def _cut(value: Any) -> EpochCut:
    demand(isinstance(value, dict) and value.keys() == {"order", "epoch", "next", "skip"})
    return EpochCut(_order(value["order"]), count(value["epoch"]), count(value["next"]), ranges(value["skip"]))


def order(value: Any) -> Order | Blend:
    """An order of samples, of one source or of several."""
    return blend(value) if isinstance(value, Mapping) and "shares" in value else _order(value)


def blend(value: Mapping[str, Any]) -> Blend:
    """The order of samples of several sources."""
    demand(value.keys() == {"shares", "first", "samples", "phase"} and isinstance(value["shares"], list))
    shares = tuple(map(_share, value["shares"]))
    demand(len({share.name for share in shares}) == len(shares) and 0 < sum(s.weight for s in shares) <= MAX_PERIOD)
    samples = None if value["samples"] is None else count(value["samples"])
    return Blend(shares, count(value["first"]), samples, count(value["phase"]))


def _share(value: Any) -> SourceShare:
    demand(isinstance(value, Mapping) and value.keys() == {"name", "weight", "order", "first", "cuts"})
    demand(isinstance(value["name"], str))
    of = _order(value["order"], least=0)  # of a source without weight a phase draws nothing
    return SourceShare(value["name"], count(value["weight"]), of, count(value["first"]), cuts(value["cuts"]))


def _order(value: Any, least: int = 1) -> Order:
    plain, of_phase = ("sequence", "windows", "seed"), ("piece", "first")
    demand(isinstance(value, Mapping) and value.keys() in ({*plain}, {*plain, *of_phase, "end"}))
    found = Order(*(count(value[name]) for name in plain))
    demand(found.sequence > 0 and found.windows > 0)
    if "piece" not in value:
        return found
    piece, first = (count(value[name]) for name in of_phase)
    end = None if value["end"] is None else count(value["end"])
    demand(piece > 0 and piece % found.sequence == 0 and found.windows % (piece // found.sequence) == 0)
    demand(first % piece == 0 and (end is None or (end >= first + least and end % piece == 0)))
    return replace(found, piece=piece, first=first, end=end)


def count(value: Any) -> int:
    """A whole number that is not negative."""
    demand(type(value) is int and 0 <= value <= _MAX)
    return int(value)


def demand(condition: bool) -> None:
    """ValueError unless a condition holds."""
    if not condition:
        raise ValueError("is no position in the data")
