"""Rows of a micro-batch that tensor ranks have: put together on all of them, or summed and taken apart."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from runtime.comm.transport import Links, Parts, Work


class _InFlight(NamedTuple):
    work: Work
    result: Tensor
    given: Tensor  # which lives until then
    sums: Tensor | None = None  # this rank's rows of those that come; they become the result


class TensorRows:
    """The exchanges of a rank with its tensor group. `pending`: what is under way, by the names it was started with."""

    def __init__(self, links: Links, rank: int, members: tuple[int, ...]) -> None:
        self.pending: dict[str, _InFlight] = {}
        self._index, self._ranks = members.index(rank), len(members)
        self.parts: Parts | None = links.parts("tensor", members) if len(members) > 1 else None

    def gather(self, name: str, rows_TD: Tensor) -> None:
        """Start to put the rows of all ranks together."""
        assert self.parts is not None
        whole = rows_TD.new_empty(self._ranks * len(rows_TD), *rows_TD.shape[1:])
        self._mine(whole).copy_(rows_TD)
        self.pending[name] = _InFlight(self.parts.gather(name, whole.view(-1)), whole, rows_TD)

    def scatter(self, name: str, rows_TD: Tensor) -> None:
        """Start to sum rows over all ranks, each of which gets its part of them."""
        assert self.parts is not None
        given = rows_TD.contiguous()
        room = given.new_empty(given.shape)
        work = self.parts.scatter(name, given.view(-1), room.view(-1))
        sums = self._mine(room)
        self.pending[name] = _InFlight(work, given.new_empty(sums.shape), given, sums)

    def wait(self, name: str) -> Tensor:
        """What an exchange gives this rank."""
        work, result, _, sums = self.pending.pop(name)
        work.wait()
        return result if sums is None else result.copy_(sums)

    def _mine(self, whole: Tensor) -> Tensor:
        return whole.chunk(self._ranks)[self._index]
