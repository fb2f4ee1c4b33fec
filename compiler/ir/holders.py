"""Who holds a parameter, in closed form: a value of a few bytes, however many columns there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

from runtime.contract.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Runs(Sequence[int]):
    """Columns, ascending: `length` neighbours from each of `firsts` on, which lie further apart than that."""

    firsts: range
    length: int

    @property
    def start(self) -> int:
        return self.firsts.start

    def __len__(self) -> int:
        return len(self.firsts) * self.length

    def __contains__(self, column: object) -> bool:
        return isinstance(column, int) and any(column - at in self.firsts for at in range(self.length))

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        run, place = divmod(range(len(self))[at], self.length)
        return self.firsts[run] + place


Columns = range | Runs


def columns_of(first: int, width: int, step: int, length: int = 1) -> Columns:
    """`length` neighbours from the first column on, and from every `step`-th behind it, of `width`. Equal columns are
    one value: neighbours without a gap are a range."""
    firsts = range(first, width, step)
    if length == 1:
        return firsts
    return range(first, first + len(firsts) * length) if length == step or len(firsts) == 1 else Runs(firsts, length)


def sharing(mesh: Mesh, of_experts: bool, split: bool, first: int = 0) -> Columns:
    """The columns that hold the same of a parameter as column `first`. What is whole of an expert is on all ranks that
    have its slices."""
    if of_experts:
        return columns_of(first, mesh.columns, mesh.expert_group, 1 if split else mesh.etp)
    return columns_of(first, mesh.columns, mesh.tp if split else 1)


@dataclass(frozen=True, slots=True)
class Holders(Sequence[int]):
    """World ranks, ascending: `columns` of each of `pipeline_ranks`, of `width` each; world rank = p·width + column.

    Two of one mesh are equal if their ranks are. A slice is a tuple, and no tuple equals it: `tuple(holders)` does.
    """

    pipeline_ranks: tuple[int, ...]  # ascending
    columns: Columns  # ascending, within range(width)
    width: int

    def on(self, pipeline_rank: int) -> Holders:
        """Those of one pipeline rank."""
        return Holders((pipeline_rank,), self.columns, self.width)

    def at(self, column: int) -> Holders:
        """Those of one column, which is one of theirs."""
        return Holders(self.pipeline_ranks, range(column, column + 1), self.width)

    def __len__(self) -> int:
        return len(self.pipeline_ranks) * len(self.columns)

    def __iter__(self) -> Iterator[int]:
        of, begins = self.columns, [p * self.width for p in self.pipeline_ranks]
        if isinstance(of, range):
            return chain.from_iterable(range(at + of.start, at + of.stop, of.step) for at in begins)
        return chain.from_iterable(range(at + first, at + first + of.length) for at in begins for first in of.firsts)

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, int):
            return False
        pipeline_rank, column = divmod(rank, self.width)
        return column in self.columns and pipeline_rank in self.pipeline_ranks

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        pipeline, column = divmod(range(len(self))[at], len(self.columns))
        return self.pipeline_ranks[pipeline] * self.width + self.columns[column]
