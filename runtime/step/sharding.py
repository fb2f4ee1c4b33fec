"""Gather and reduce what ranks hold in parts: gradients and weights (zero = 2, 3), and rows of a micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

from torch import Tensor

from runtime.comm.transport import Links, Parts, PartsKind, Work
from runtime.contract import zigzag
from runtime.state.state import FlatBucket, State, namespace, views

# --- Gradients, and weights, that the data ranks of a pipeline rank divide (zero = 2, 3): put together for one segment
#
# Each rank keeps its part of them (runtime/state/state.py). A segment's W adds to zeros that are all of its gradients.
# These are then summed over those ranks, and each adds its part of the sums to what it keeps. A segment's weights are
# gathered before it runs. Both are values of its stage, between the instructions that make and free them.


class WholeTensors(SimpleNamespace):
    """The divided tensors of a segment, as attributes, in one flat tensor: bucket after bucket, with its padding."""

    flat: Tensor


class _InFlight(NamedTuple):
    whole: WholeTensors
    works: list[Work]


class Sharding:
    """What a rank puts together for its segments. `pending`: what is under way, by the names it was started with."""

    def __init__(self, state: State, links: Links) -> None:
        self.pending: dict[str, _InFlight] = {}
        self._of_site: dict[str, list[FlatBucket]] = defaultdict(list)
        for bucket in state.buckets:
            for site in bucket.sites:
                self._of_site[site].append(bucket)
        groups = dict.fromkeys(bucket.dividers for bucket in state.buckets if bucket.sites)
        self.parts = {dividers: links.parts("reduce", dividers) for dividers in groups}

    def zeros(self, site: str) -> WholeTensors:
        """Accumulators of a segment, for one micro-batch."""
        kept = self._of_site[site][0].gradients
        return self._whole(site, kept.new_zeros(self._size(site)))

    def scatter(self, name: str, site: str, gradients: WholeTensors) -> None:
        """Start to sum a segment's gradients over those who divide them."""
        pieces = self._pieces(site, gradients.flat)
        works = [self.parts[bucket.dividers].scatter(name, flat, flat) for bucket, flat in pieces]
        self.pending[name] = _InFlight(gradients, works)

    def wait_scatter(self, name: str, site: str) -> None:
        """Add this rank's part of the sums to what it keeps."""
        gradients, works = self.pending.pop(name)
        for (bucket, flat), work in zip(self._pieces(site, gradients.flat), works, strict=True):
            work.wait()
            bucket.gradients.add_(flat[bucket.kept])

    def gather(self, name: str, site: str) -> None:
        """Start to put the weights of a segment together."""
        kept = self._of_site[site][0].parameters
        weights, works = self._whole(site, kept.new_empty(self._size(site))), list[Work]()
        for bucket, flat in self._pieces(site, weights.flat):
            flat[bucket.kept] = bucket.parameters
            works.append(self.parts[bucket.dividers].gather(name, flat))
        self.pending[name] = _InFlight(weights, works)

    def wait_gather(self, name: str) -> WholeTensors:
        """The weights of the segment."""
        weights, works = self.pending.pop(name)
        for work in works:
            work.wait()
        return weights

    def _size(self, site: str) -> int:
        return sum(bucket.padded for bucket in self._of_site[site])

    def _pieces(self, site: str, flat: Tensor) -> Iterator[tuple[FlatBucket, Tensor]]:
        """The buckets of a segment, and all of each."""
        buckets = self._of_site[site]
        return zip(buckets, flat.split([bucket.padded for bucket in buckets]), strict=True)

    def _whole(self, site: str, flat: Tensor) -> WholeTensors:
        tensors = {name: view for bucket, piece in self._pieces(site, flat) for name, view in views(bucket, piece)}
        return WholeTensors(flat=flat, **vars(namespace(tensors)))


# --- Rows of a micro-batch that ranks have parts of: put together on all of them, or summed and taken apart
#
# Tensor ranks have rows one behind the other. Context ranks have parts of each sequence (runtime/contract/zigzag.py);
# what they put together is in the order of sequences.


class _RowsInFlight(NamedTuple):
    work: Work
    result: Tensor
    given: Tensor  # which lives until then
    sums: Tensor | None = None  # this rank's rows of those that come; they become the result


class SplitRows:
    """The exchanges of a rank with its tensor group. `pending`: what is under way, by the names it was started with."""

    kind: PartsKind = "tensor"

    def __init__(self, links: Links, rank: int, members: tuple[int, ...]) -> None:
        self.pending: dict[str, _RowsInFlight] = {}
        self._index, self._ranks = members.index(rank), len(members)
        self.parts: Parts | None = links.parts(self.kind, members) if len(members) > 1 else None

    def gather(self, name: str, rows_TD: Tensor) -> None:
        """Start to put the rows of all ranks together."""
        assert self.parts is not None
        whole = rows_TD.new_empty(self._ranks * len(rows_TD), *rows_TD.shape[1:])
        self._mine(whole).copy_(rows_TD)
        self.pending[name] = _RowsInFlight(self.parts.gather(name, whole.view(-1)), whole, rows_TD)

    def scatter(self, name: str, rows_TD: Tensor) -> None:
        """Start to sum rows over all ranks, each of which gets its part of them."""
        assert self.parts is not None
        given = self._by_rank(rows_TD).contiguous()
        room = given.new_empty(given.shape)
        work = self.parts.scatter(name, given.view(-1), room.view(-1))
        sums = self._mine(room)
        self.pending[name] = _RowsInFlight(work, given.new_empty(sums.shape), given, sums)

    def wait(self, name: str) -> Tensor:
        """What an exchange gives this rank."""
        work, result, _, sums = self.pending.pop(name)
        work.wait()
        if sums is not None:
            return result.copy_(sums)
        return self._in_order(result)

    def _mine(self, whole: Tensor) -> Tensor:
        return whole.chunk(self._ranks)[self._index]

    def _by_rank(self, rows: Tensor) -> Tensor:
        """Rows as they are sent: those of the first rank first."""
        return rows

    def _in_order(self, rows: Tensor) -> Tensor:
        """Rows as segments read them, of those that came: those of the first rank first."""
        return rows


class ChoiceCounts(SplitRows):
    """The exchanges of a rank with those that have parts of the same sequences: how often each expert is chosen."""

    kind: PartsKind = "choices"


class Sequences(SplitRows):
    """The exchanges of a rank with its context group, which have parts of so many `sequences`."""

    kind: PartsKind = "context"

    def __init__(self, links: Links, rank: int, members: tuple[int, ...], sequences: int) -> None:
        super().__init__(links, rank, members)
        self._sequences = sequences

    def _by_rank(self, rows: Tensor) -> Tensor:
        return zigzag.by_rank(rows, self._sequences, self._ranks)

    def _in_order(self, rows: Tensor) -> Tensor:
        return zigzag.in_order(rows, self._sequences, self._ranks)
