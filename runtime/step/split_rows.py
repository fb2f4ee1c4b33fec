"""Rows of a micro-batch that ranks have parts of: put together on all of them, or summed and taken apart.

Tensor ranks have rows one behind the other. Context ranks have parts of each sequence (runtime/contract/zigzag.py);
what they put together is in the order of sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from runtime.comm.transport import Links, Parts, PartsKind, Work
from runtime.contract import zigzag


class _InFlight(NamedTuple):
    work: Work
    result: Tensor
    given: Tensor  # which lives until then
    sums: Tensor | None = None  # this rank's rows of those that come; they become the result


class SplitRows:
    """The exchanges of a rank with its tensor group. `pending`: what is under way, by the names it was started with."""

    kind: PartsKind = "tensor"

    def __init__(self, links: Links, rank: int, members: tuple[int, ...]) -> None:
        self.pending: dict[str, _InFlight] = {}
        self._index, self._ranks = members.index(rank), len(members)
        self.parts: Parts | None = links.parts(self.kind, members) if len(members) > 1 else None

    def gather(self, name: str, rows_TD: Tensor) -> None:
        """Start to put the rows of all ranks together."""
        assert self.parts is not None
        whole = rows_TD.new_empty(self._ranks * len(rows_TD), *rows_TD.shape[1:])
        self._mine(whole).copy_(rows_TD)
        self.pending[name] = _InFlight(self.parts.gather(name, whole.view(-1)), whole, rows_TD)

    def scatter(self, name: str, rows_TD: Tensor) -> None:
        """Start to sum rows over all ranks, each of which gets its part of them."""
        assert self.parts is not None
        given = self._by_rank(rows_TD).contiguous()
        room = given.new_empty(given.shape)
        work = self.parts.scatter(name, given.view(-1), room.view(-1))
        sums = self._mine(room)
        self.pending[name] = _InFlight(work, given.new_empty(sums.shape), given, sums)

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


class Choices(SplitRows):
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
