"""Where the rows of an exchange lie: member after member, or with the rank that receives them, expert after expert.

Of source 0 two rows for expert a and one for b, of source 1 one for a and two for b, padded to multiples of 4:

    a0 a0 a1 ·  b0 b1 b1 ·

So the rows of an expert are one piece of the tensor, which a product takes whole. Padding is rows of zeros. It is made
where it lies, and never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The rows that an expert rank receives: expert after expert, of each expert source after source, then padding to a
    multiple of `alignment` rows."""

    counts: tuple[tuple[int, ...], ...]  # [source][local expert]
    alignment: int = 1

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each piece: of each expert, those of each source and those of padding."""
        found: list[int] = []
        for from_sources in zip(*self.counts, strict=True):
            found += [*from_sources, -sum(from_sources) % self.alignment]
        return found

    @cached_property
    def ends(self) -> list[int]:
        """Where the rows of each expert end, behind their padding."""
        return list(accumulate(self.sizes))[len(self.counts) :: len(self.counts) + 1]

    @property
    def num_rows(self) -> int:
        """Rows of the tensor, R, padding among them."""
        return self.ends[-1]

    @property
    def of_sources(self) -> tuple[int, ...]:
        """Rows that each source sends."""
        return tuple(map(sum, self.counts))

    def empty(self, like: Tensor) -> Tensor:
        """A tensor for rows as those of `like`. Padding is zero, the other rows are yet to come."""
        tensor = empty_rows(like, self.num_rows)
        padding = tensor.split(self.sizes)[len(self.counts) :: len(self.counts) + 1]
        torch._foreach_zero_([raw(rows) for rows in padding])
        return tensor


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor that go to, or come from, each member of an expert group: [rows, …], of any dtype."""

    tensor: Tensor
    counts: tuple[int, ...]  # of each member
    layout: Layout | None = None  # None: they lie member after member
    sources: tuple[tuple[int, ...], ...] = ()  # of a layout, that each member brings or takes; (): itself

    def pieces(self) -> list[Sequence[Tensor]]:
        """The rows of each member, as views."""
        if self.layout is None:
            return [(rows,) for rows in self.tensor.split(self.counts)]
        pieces, step = self.tensor.split(self.layout.sizes), len(self.layout.counts) + 1
        sources = self.sources or [(member,) for member in range(len(self.counts))]
        return [[piece for source in each for piece in pieces[source::step]] for each in sources]

    def packed(self) -> Tensor:
        """The rows in a contiguous tensor, member after member: moved, unless they lie so."""
        if self.layout is None:
            return self.tensor.contiguous()
        packed = self.tensor.new_empty(sum(self.counts), *self.tensor.shape[1:])
        Rows(packed, self.counts).fill(self)
        return packed

    def room(self) -> Tensor:
        """A contiguous tensor for the rows, member after member: this one, if they lie so here."""
        if self.layout is None and self.tensor.is_contiguous():
            return self.tensor
        return self.tensor.new_empty(sum(self.counts), *self.tensor.shape[1:])

    def fill(self, source: Rows) -> None:
        """Copy the rows of `source`, of as many for each member, to their places."""
        to: list[Tensor] = []
        rows: list[Tensor] = []
        for mine, theirs in zip(self.pieces(), source.pieces(), strict=True):
            to += _cut_as(theirs, mine)
            rows += _cut_as(mine, theirs)
        torch._foreach_copy_(to, rows)


def copy_rows(to: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Copy pieces of rows to their places, in this order. One side may be a single piece, where they lie together."""
    torch._foreach_copy_([*_cut_as(rows, to)], [*_cut_as(to, rows)])


def _cut_as(others: Sequence[Tensor], pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The pieces; if they are one, and others several, cut as those are."""
    if len(pieces) == len(others):
        found = pieces
    else:
        found = pieces[0].split([len(each) for each in others]) if len(pieces) == 1 else pieces
    return [raw(piece) for piece in found]


def raw(tensor: Tensor) -> Tensor:
    """A tensor that is moved and not computed with, as bytes where an element is one."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor that is moved and not computed with, as bytes where gloo does not know the dtype. Rows stay rows."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bfloat16 else raw(tensor)


def empty_rows(like: Tensor, num_rows: int) -> Tensor:
    """A tensor of so many rows as those of `like`, that lies column by column if `like` does."""
    if like.dim() == 2 and like.shape[1] > 1 and like.stride(0) == 1:
        return like.new_empty(like.shape[1], num_rows).t()
    return like.new_empty(num_rows, *like.shape[1:])
