"""The order in which samples of several sources are drawn. Sample i is a pure function of (names, weights, seed, i).

After any n samples, a source of share w has given floor(w·n) or ceil(w·n): the chairman assignment (Tijdeman, Discrete
Mathematics 32, 1980). With integer weights that sum to D, the (m+1)-th sample of a source of weight a is at a place
between floor(m·D/a) and ceil((m+1)·D/a) - 1, counted from 0. Among the sources whose next sample is allowed, the one
with the earliest deadline is drawn (Steiner and Yeomans, Management Science 39, 1993). After D samples each source has
given its weight, and the places repeat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.contract import MAX_PERIOD
from runtime.data.cuts import EpochCut, is_left_out
from runtime.data.order import Order

_WALKS = Lock()


def seed_of(seed: int, source: str) -> int:
    """Derive the seed of a source's order from the seed of the run. Sources of equal length get different orders."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{source}".encode(), digest_size=6).digest(), "big")


@dataclass(frozen=True)
class SourceShare:
    """A source of a blend. `order`: the order of its samples. `first`: index of the first sample drawn. `cuts`: what
    was drawn earlier in the epoch of that sample, under other orders."""

    name: str
    weight: int
    order: Order
    first: int = 0
    cuts: tuple[EpochCut, ...] = ()

    def index(self, number: int) -> int:
        """Return the index, in the order of this source, of the sample that it gives after `number` others."""
        if not self.cuts:
            return self.first + number
        end = (self.cuts[0].epoch + 1) * self.order.windows
        with _WALKS:  # one thread reads samples, another counts epochs
            drawn = _walk(self.order, self.first, self.cuts)
            while len(drawn) <= number and not (drawn and drawn[-1] >= end):
                index = drawn[-1] + 1 if drawn else self.first
                while index < end and is_left_out(self.order, index, self.cuts):
                    index += 1
                drawn.append(index)
            return drawn[number] if number < len(drawn) else drawn[-1] + number - len(drawn) + 1


@lru_cache(maxsize=64)
def _walk(order: Order, first: int, cuts: tuple[EpochCut, ...]) -> list[int]:
    """Cache of the samples that are not left out, in order. The caller extends it."""
    return []


@dataclass(frozen=True)
class Blend:
    """The order of samples of several sources. Sample `first` of the run is the first that these shares give.

    `samples`: number of samples of a phase that another follows, else None. `phase`: number of the phase, 0 in a run
    without phases.
    """

    shares: tuple[SourceShare, ...]
    first: int = 0
    samples: int | None = None
    phase: int = 0

    def place(self, index: int) -> tuple[int, int]:
        """Return the number of a sample's source, and the sample's index in the order of that source."""
        period, offset = divmod(index - self.first, self._period)
        assert period >= 0, f"sample {index} was drawn before sample {self.first}, by other shares"
        sources, before = _places(self.weights)
        number = int(sources[offset])
        share = self.shares[number]
        return number, share.index(period * share.weight + int(before[offset]))

    def counts(self, index: int) -> tuple[int, ...]:
        """Return how many samples each source has given with these shares before a sample of the run."""
        period, offset = divmod(index - self.first, self._period)
        counts = np.bincount(_places(self.weights)[0][:offset], minlength=len(self.shares)).tolist()
        return tuple(period * share.weight + count for share, count in zip(self.shares, counts, strict=True))

    def nexts(self, index: int) -> dict[str, int]:
        """Return source → index of its next sample, if sample `index` of the run is next."""
        return {s.name: s.index(count) for s, count in zip(self.shares, self.counts(index), strict=True)}

    def epochs(self, index: int) -> dict[str, float]:
        """Return source → how often its text was read, if sample `index` of the run is next."""
        windows = {share.name: share.order.windows for share in self.shares}
        return {name: following / windows[name] for name, following in self.nexts(index).items()}

    def goes_on_in(self, planned: Blend) -> bool:
        """Whether this blend equals that of a build, whose sources are at their beginnings."""
        return (self.weights, self.samples, self.phase) == (
            planned.weights,
            planned.samples,
            planned.phase,
        ) and all(
            (own_share.name, own_share.order.whole_run) == (planned_share.name, planned_share.order.whole_run)
            for own_share, planned_share in zip(self.shares, planned.shares, strict=True)
        )

    @property
    def weights(self) -> tuple[int, ...]:
        """Weights of the shares."""
        return tuple(share.weight for share in self.shares)

    @property
    def _period(self) -> int:
        return sum(self.weights)

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a checkpoint."""
        shares = [
            vars(share) | {"order": share.order.to_json(), "cuts": [cut.to_json() for cut in share.cuts]}
            for share in self.shares
        ]
        return {"shares": shares, "first": self.first, "samples": self.samples, "phase": self.phase}


Numbers = npt.NDArray[np.int32]


@lru_cache(maxsize=8)
def _places(weights: tuple[int, ...]) -> tuple[Numbers, Numbers]:
    """Return the source of each sample of a period, and how many samples that source has given before."""
    assert 0 < sum(weights) <= MAX_PERIOD and min(weights) >= 0, weights
    sources = np.fromiter(_sources(weights), np.int32)
    before = np.empty_like(sources)
    for number, weight in enumerate(weights):
        before[sources == number] = np.arange(weight)
    return sources, before


def _sources(weights: Sequence[int]) -> Iterator[int]:
    """Yield the source of each place of a period: among the allowed ones, that with the earliest deadline."""
    period = sum(weights)
    # (First allowed place of the next sample, source).
    waiting = [(0, number) for number, weight in enumerate(weights) if weight]
    ready: list[tuple[int, int]] = []  # (last allowed place, source)
    num_given = [0] * len(weights)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, number = heappop(waiting)
            heappush(ready, (-(-(num_given[number] + 1) * period // weights[number]) - 1, number))
        last, number = heappop(ready)
        assert last >= place, "each sample has a place between its first and its last allowed one"
        num_given[number] += 1
        heappush(waiting, (num_given[number] * period // weights[number], number))
        yield number


def limit_to_phase(share: SourceShare, begin: int, samples: int | None) -> SourceShare:
    """Return the share of a phase. It reads whole pieces from token `begin` on, counted over all epochs of the source:
    as many as its samples need, or all if `samples` is None."""
    order, piece = share.order, share.order.piece
    end = None if samples is None else begin + -(-samples * order.sequence // piece) * piece
    return replace(share, order=replace(order, first=begin, end=end), first=begin // order.sequence)
