"""Gather and reduce-scatter sharded tensors: gradients and weights (zero = 2, 3), and rows of a micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

from torch import Tensor

from runtime.comm.transport import Links, Parts, PartsKind, Work
from runtime.contract import zigzag
from runtime.state.state import FlatBucket, State, namespace, views

# --- Gradients and weights that are sharded over the data ranks of a pipeline rank (zero = 2, 3), one segment at a time
#
# Each rank keeps its shard (runtime/state/state.py). W of a segment adds to full-size gradients that start as zeros.
# These are reduce-scattered, and each rank adds its shard of the sums to its accumulator. The weights of a segment are
# gathered before it runs. Both are values of its stage, between the instructions that make and free them.


class WholeTensors(SimpleNamespace):
    """The whole tensors of a segment as attributes: views of one flat tensor, bucket after bucket, with padding."""

    flat: Tensor


class _InFlight(NamedTuple):
    tensors: WholeTensors
    works: list[Work]


class Sharding:
    """Collectives on the sharded tensors of a rank's segments. `pending`: those that were started, by name."""

    def __init__(self, state: State, links: Links) -> None:
        self.pending: dict[str, _InFlight] = {}
        self._of_site: dict[str, list[FlatBucket]] = defaultdict(list)
        for bucket in state.buckets:
            for site in bucket.sites:
                self._of_site[site].append(bucket)
        groups = dict.fromkeys(bucket.dividers for bucket in state.buckets if bucket.sites)
        self.parts = {dividers: links.parts("reduce", dividers) for dividers in groups}

    def zeros(self, site: str) -> WholeTensors:
        """Return zeroed accumulators of a segment, for one micro-batch."""
        shard = self._of_site[site][0].gradients
        return self._tensors_of(site, shard.new_zeros(self._size(site)))

    def scatter(self, name: str, site: str, gradients: WholeTensors) -> None:
        """Start to reduce-scatter a segment's gradients over the ranks that shard them."""
        pieces = self._pieces(site, gradients.flat)
        works = [self.parts[bucket.dividers].scatter(name, flat, flat) for bucket, flat in pieces]
        self.pending[name] = _InFlight(gradients, works)

    def wait_scatter(self, name: str, site: str) -> None:
        """Add this rank's shard of the sums to its accumulator."""
        gradients, works = self.pending.pop(name)
        for (bucket, flat), work in zip(self._pieces(site, gradients.flat), works, strict=True):
            work.wait()
            bucket.gradients.add_(flat[bucket.kept_span])

    def gather(self, name: str, site: str) -> None:
        """Start to all-gather the weights of a segment."""
        shard = self._of_site[site][0].parameters
        weights, works = self._tensors_of(site, shard.new_empty(self._size(site))), list[Work]()
        for bucket, flat in self._pieces(site, weights.flat):
            flat[bucket.kept_span] = bucket.parameters
            works.append(self.parts[bucket.dividers].gather(name, flat))
        self.pending[name] = _InFlight(weights, works)

    def wait_gather(self, name: str) -> WholeTensors:
        """Return the whole weights of the segment."""
        weights, works = self.pending.pop(name)
        for work in works:
            work.wait()
        return weights

    def _size(self, site: str) -> int:
        return sum(bucket.padded for bucket in self._of_site[site])

    def _pieces(self, site: str, flat: Tensor) -> Iterator[tuple[FlatBucket, Tensor]]:
        """Pair the buckets of a segment with their whole tensors in `flat`."""
        buckets = self._of_site[site]
        return zip(buckets, flat.split([bucket.padded for bucket in buckets]), strict=True)

    def _tensors_of(self, site: str, flat: Tensor) -> WholeTensors:
        tensors = {name: view for bucket, piece in self._pieces(site, flat) for name, view in views(bucket, piece)}
        return WholeTensors(flat=flat, **vars(namespace(tensors)))


# --- Rows of a micro-batch that are sharded over ranks: all-gather and reduce-scatter
#
# Tensor ranks have contiguous rows. Context ranks have parts of each sequence (runtime/contract/zigzag.py); gathered
# rows are in the order of sequences.


class _RowsInFlight(NamedTuple):
    work: Work
    result: Tensor
    operand: Tensor  # kept alive until the work is done
    sums: Tensor | None = None  # this rank's rows of the output; copied to the result


class SplitRows:
    """The collectives of a rank in its tensor group. `pending`: those that were started, by name."""

    kind: PartsKind = "tensor"

    def __init__(self, links: Links, rank: int, members: tuple[int, ...]) -> None:
        self.pending: dict[str, _RowsInFlight] = {}
        self._index, self._ranks = members.index(rank), len(members)
        self.parts: Parts | None = links.parts(self.kind, members) if len(members) > 1 else None

    def gather(self, name: str, rows_TD: Tensor) -> None:
        """Start to all-gather the rows of all ranks."""
        assert self.parts is not None
        gathered = rows_TD.new_empty(self._ranks * len(rows_TD), *rows_TD.shape[1:])
        self._own_chunk(gathered).copy_(rows_TD)
        self.pending[name] = _RowsInFlight(self.parts.gather(name, gathered.view(-1)), gathered, rows_TD)

    def scatter(self, name: str, rows_TD: Tensor) -> None:
        """Start to reduce-scatter rows over all ranks."""
        assert self.parts is not None
        operand = self._order_by_rank(rows_TD).contiguous()
        room = operand.new_empty(operand.shape)
        work = self.parts.scatter(name, operand.view(-1), room.view(-1))
        sums = self._own_chunk(room)
        self.pending[name] = _RowsInFlight(work, operand.new_empty(sums.shape), operand, sums)

    def wait(self, name: str) -> Tensor:
        """Return the result of a collective."""
        work, result, _, sums = self.pending.pop(name)
        work.wait()
        if sums is not None:
            return result.copy_(sums)
        return self._in_order(result)

    def _own_chunk(self, rows: Tensor) -> Tensor:
        return rows.chunk(self._ranks)[self._index]

    def _order_by_rank(self, rows: Tensor) -> Tensor:
        """Return the rows in the order in which they are sent: rank after rank."""
        return rows

    def _in_order(self, rows: Tensor) -> Tensor:
        """Return received rows in the order in which segments read them."""
        return rows


class ChoiceCounts(SplitRows):
    """All-gather of the counts of chosen experts over the ranks that share sequences."""

    kind: PartsKind = "choices"


class Sequences(SplitRows):
    """The collectives of a rank in its context group. `sequences`: number of sequences that the group shares."""

    kind: PartsKind = "context"

    def __init__(self, links: Links, rank: int, members: tuple[int, ...], sequences: int) -> None:
        super().__init__(links, rank, members)
        self._sequences = sequences

    def _order_by_rank(self, rows: Tensor) -> Tensor:
        return zigzag.sort_by_rank(rows, self._sequences, self._ranks)

    def _in_order(self, rows: Tensor) -> Tensor:
        return zigzag.sort_by_sequence(rows, self._sequences, self._ranks)
