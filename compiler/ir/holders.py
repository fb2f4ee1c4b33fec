"""The ranks that hold a parameter, in closed form: a few bytes for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

from runtime.contract.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Runs(Sequence[int]):
    """Ascending columns: runs of `length` adjacent columns that start at `firsts`, with gaps between them."""

    firsts: range
    length: int

    @property
    def start(self) -> int:
        return self.firsts.start

    def __len__(self) -> int:
        return len(self.firsts) * self.length

    def __contains__(self, column: object) -> bool:
        return isinstance(column, int) and any(column - offset in self.firsts for offset in range(self.length))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        run, place = divmod(range(len(self))[index], self.length)
        return self.firsts[run] + place


Columns = range | Runs


def columns_of(first: int, width: int, step: int, length: int = 1) -> Columns:
    """Runs of `length` adjacent columns below `width`, from column `first` on, every `step` columns. Equal columns give
    equal values: runs without gaps become a range."""
    firsts = range(first, width, step)
    if length == 1:
        return firsts
    return range(first, first + len(firsts) * length) if length == step or len(firsts) == 1 else Runs(firsts, length)


def sharing(mesh: Mesh, is_expert: bool, split: bool, first: int = 0) -> Columns:
    """The columns that hold the same part of a parameter as column `first`. A parameter of an expert that is not
    `split` is on all ranks that have slices of the expert."""
    if is_expert:
        return columns_of(first, mesh.columns, mesh.expert_group, 1 if split else mesh.etp)
    return columns_of(first, mesh.columns, mesh.tp if split else 1)


@dataclass(frozen=True, slots=True)
class Holders(Sequence[int]):
    """Ascending world ranks: `columns` on each of `pipeline_ranks`, where world rank = pipeline rank · width + column.

    Two holders in one mesh are equal if and only if their ranks are. They never equal a tuple: compare
    `tuple(holders)`. A slice is a tuple.
    """

    pipeline_ranks: tuple[int, ...]  # ascending
    columns: Columns  # ascending, within range(width)
    width: int

    def on_rank(self, pipeline_rank: int) -> Holders:
        """The holders on one pipeline rank."""
        return Holders((pipeline_rank,), self.columns, self.width)

    def of_first_copy(self, copies: int) -> Holders:
        """The holders in the first of `copies` equal groups of adjacent columns, which hold alike (`Mesh.copies`)."""
        width, columns = self.width // copies, self.columns
        if isinstance(columns, range):
            within: Columns = range(columns.start, min(columns.stop, width), columns.step)
        else:
            within = columns_of(columns.start, width, columns.firsts.step, columns.length)
        return Holders(self.pipeline_ranks, within, self.width)

    def alike(self, copies: int, column: int | None = None) -> Holders:
        """The holders that keep the same shard as a column, the first one by default: one for each copy on each
        pipeline rank."""
        step = self.width // copies
        first = self.columns.start if column is None else column % step
        return Holders(self.pipeline_ranks, range(first, self.width, step), self.width)

    @property
    def period(self) -> int:
        """The number of columns after which its columns repeat."""
        firsts = self.columns.firsts if isinstance(self.columns, Runs) else self.columns
        return firsts.step if len(firsts) * firsts.step == self.width else self.width

    def num_shards(self, copies: int) -> int:
        """The number of holders that share a copy on a pipeline rank."""
        return len(self.columns) // copies

    def __len__(self) -> int:
        return len(self.pipeline_ranks) * len(self.columns)

    def __iter__(self) -> Iterator[int]:
        runs, begins = self.columns, [p * self.width for p in self.pipeline_ranks]
        if isinstance(runs, range):
            return chain.from_iterable(range(begin + runs.start, begin + runs.stop, runs.step) for begin in begins)
        return chain.from_iterable(
            range(begin + first, begin + first + runs.length) for begin in begins for first in runs.firsts
        )

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, int):
            return False
        pipeline_rank, column = divmod(rank, self.width)
        return column in self.columns and pipeline_rank in self.pipeline_ranks

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        pipeline, column = divmod(range(len(self))[index], len(self.columns))
        return self.pipeline_ranks[pipeline] * self.width + self.columns[column]
