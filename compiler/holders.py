"""Who holds a parameter, in closed form: a value of a few bytes, however many data ranks there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload


@dataclass(frozen=True, slots=True)
class Holders(Sequence[int]):
    """World ranks, ascending: data ranks `data_ranks` of each of `pipeline_ranks`; world rank = p·dp + d.

    Two of one mesh are equal if their ranks are. A slice is a tuple, and no tuple equals it: `tuple(holders)` does.
    """

    pipeline_ranks: tuple[int, ...]  # ascending
    data_ranks: range  # ascending, within range(dp)
    dp: int

    def __len__(self) -> int:
        return len(self.pipeline_ranks) * len(self.data_ranks)

    def __iter__(self) -> Iterator[int]:
        data = self.data_ranks
        runs = (range(p * self.dp + data.start, p * self.dp + data.stop, data.step) for p in self.pipeline_ranks)
        return chain.from_iterable(runs)

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, int):
            return False
        pipeline_rank, data_rank = divmod(rank, self.dp)
        return data_rank in self.data_ranks and pipeline_rank in self.pipeline_ranks

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        pipeline, data = divmod(range(len(self))[at], len(self.data_ranks))
        return self.pipeline_ranks[pipeline] * self.dp + self.data_ranks[data]
