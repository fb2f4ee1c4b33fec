"""The order in which samples of several sources are drawn. Sample i is a pure function of (names, weights, seed, i).

Of n samples a source of share w has floor(w·n) or ceil(w·n), after each n: the chairman assignment (Tijdeman, Discrete
Mathematics 32, 1980). With whole weights that sum to D, the (m+1)-th sample of a source of weight a has its place
between floor(m·D/a) and ceil((m+1)·D/a) - 1, counted from 0. Of the sources whose next sample may come, the one goes
that must come first (Steiner and Yeomans, Management Science 39, 1993). After D samples each source has had its weight,
and the places repeat.
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
from runtime.data.cuts import EpochCut, left_out
from runtime.data.order import Order

_WALKS = Lock()


def seed_of(seed: int, source: str) -> int:
    """The seed of the order of a source, by the seed of the run. Sources of equal length have different orders."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{source}".encode(), digest_size=6).digest(), "big")


@dataclass(frozen=True)
class SourceShare:
    """A source of a blend. `order`: that of its samples, of which `first` is the first that is drawn; `cuts`: what was
    drawn of that one's epoch before, under earlier orders."""

    name: str
    weight: int
    order: Order
    first: int = 0
    cuts: tuple[EpochCut, ...] = ()

    def index(self, number: int) -> int:
        """The index in its order of the sample that this source gives after `number` others."""
        if not self.cuts:
            return self.first + number
        end = (self.cuts[0].epoch + 1) * self.order.windows
        with _WALKS:  # samples are read by another thread than the one that counts epochs
            drawn = _walk(self.order, self.first, self.cuts)
            while len(drawn) <= number and not (drawn and drawn[-1] >= end):
                index = drawn[-1] + 1 if drawn else self.first
                while index < end and left_out(self.order, index, self.cuts):
                    index += 1
                drawn.append(index)
            return drawn[number] if number < len(drawn) else drawn[-1] + number - len(drawn) + 1


@lru_cache(maxsize=64)
def _walk(order: Order, first: int, cuts: tuple[EpochCut, ...]) -> list[int]:
    """The samples that were found not to be left out, to be continued."""
    return []


@dataclass(frozen=True)
class Blend:
    """The order of samples of several sources. Sample `first` of the run is the first that these shares give.

    Of a phase that another follows, `samples` is how many it draws; `phase` is its number, 0 in a run without phases.
    """

    shares: tuple[SourceShare, ...]
    first: int = 0
    samples: int | None = None
    phase: int = 0

    def place(self, index: int) -> tuple[int, int]:
        """The number of the source that a sample is of, and the sample's index in that source's order."""
        period, at = divmod(index - self.first, self._period)
        assert period >= 0, f"sample {index} was drawn before sample {self.first}, by other shares"
        sources, before = _places(self.weights)
        number = int(sources[at])
        share = self.shares[number]
        return number, share.index(period * share.weight + int(before[at]))

    def counts(self, index: int) -> tuple[int, ...]:
        """How many samples each source has given before a sample of the run, of those that these shares give."""
        period, at = divmod(index - self.first, self._period)
        rest = np.bincount(_places(self.weights)[0][:at], minlength=len(self.shares)).tolist()
        return tuple(period * share.weight + more for share, more in zip(self.shares, rest, strict=True))

    def nexts(self, index: int) -> dict[str, int]:
        """By source, the index in its order of the sample that it gives next, where a sample of the run is next."""
        return {s.name: s.index(count) for s, count in zip(self.shares, self.counts(index), strict=True)}

    def epochs(self, index: int) -> dict[str, float]:
        """By source, how often its text was read, where a sample of the run is next."""
        windows = {share.name: share.order.windows for share in self.shares}
        return {name: following / windows[name] for name, following in self.nexts(index).items()}

    def goes_on_in(self, other: Blend) -> bool:
        """Whether a blend as a build has it, whose sources are at their beginnings, is this one."""
        return (self.weights, self.samples, self.phase) == (other.weights, other.samples, other.phase) and all(
            (mine.name, mine.order.whole) == (its.name, its.order.whole)
            for mine, its in zip(self.shares, other.shares, strict=True)
        )

    @property
    def weights(self) -> tuple[int, ...]:
        """Those of the shares."""
        return tuple(share.weight for share in self.shares)

    @property
    def _period(self) -> int:
        return sum(self.weights)

    def to_json(self) -> dict[str, Any]:
        """The fields, as a checkpoint has them."""
        shares = [
            vars(share) | {"order": share.order.to_json(), "cuts": [cut.to_json() for cut in share.cuts]}
            for share in self.shares
        ]
        return {"shares": shares, "first": self.first, "samples": self.samples, "phase": self.phase}


Numbers = npt.NDArray[np.int32]


@lru_cache(maxsize=8)
def _places(weights: tuple[int, ...]) -> tuple[Numbers, Numbers]:
    """The source of each sample of a period, and how many samples that source has had before."""
    assert 0 < sum(weights) <= MAX_PERIOD and min(weights) >= 0, weights
    sources = np.fromiter(_sources(weights), np.int32)
    before = np.empty_like(sources)
    for number, weight in enumerate(weights):
        before[sources == number] = np.arange(weight)
    return sources, before


def _sources(weights: Sequence[int]) -> Iterator[int]:
    """The sources of a period: of those whose next sample may come, the one whose sample must come first."""
    period = sum(weights)
    waiting = [(0, number) for number, weight in enumerate(weights) if weight]  # first place of the next sample, source
    ready: list[tuple[int, int]] = []  # last place of it, source
    given = [0] * len(weights)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, number = heappop(waiting)
            heappush(ready, (-(-(given[number] + 1) * period // weights[number]) - 1, number))
        last, number = heappop(ready)
        assert last >= place, "each sample has a place between its first and its last"
        given[number] += 1
        heappush(waiting, (given[number] * period // weights[number], number))
        yield number


def in_phase(share: SourceShare, begin: int, samples: int | None) -> SourceShare:
    """The share of a phase, which reads whole pieces from token `begin` of the source's count on: as many as hold its
    samples, or all there are."""
    order, piece = share.order, share.order.piece
    end = None if samples is None else begin + -(-samples * order.sequence // piece) * piece
    return replace(share, order=replace(order, first=begin, end=end), first=begin // order.sequence)
