"""The position of a run in its data: what it has trained on, and which samples come next.

The position is part of a checkpoint. It is updated in each step and never computed from the step number, so a run that
resumes with another batch, sequence or seed neither skips nor repeats samples.

Samples continue seamlessly from one phase of a run to the next (runtime/data/order.py).

If the window length (sequence) or the order (seed) changes, the rest of the epoch has the windows that were not seen
yet: a window is left out if more than half of it was seen. If new windows divide old ones, no token is skipped or
repeated; otherwise no choice of whole windows skips and repeats fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.data import order_json
from runtime.data.blend import Blend, limit_to_phase
from runtime.data.cuts import MAX_CUTS, EpochCut, Ranges, is_left_out, num_seen
from runtime.data.order import Order

_MAX_COUNTED = 1 << 13  # most windows of an epoch for counting skipped and repeated tokens

Move = Callable[["Position", Order], "Position"]


@dataclass(frozen=True)
class Position:
    """Trained `samples` and `tokens`, and the index of the `next` sample. `skip`: samples that will be left out.

    `order`: the order that `next` refers to; None if samples are only counted (a new run, and tests). `cuts`: what was
    drawn in this epoch under earlier orders.
    """

    samples: int = 0
    tokens: int = 0
    next: int = 0
    skip: Ranges = ()
    order: Order | Blend | None = None
    cuts: tuple[EpochCut, ...] = ()

    def draw(self, size: int) -> npt.NDArray[np.int64]:
        """Return the indices of the next `size` samples."""
        if not self.skip and not self.cuts:
            return np.arange(self.next, self.next + size)
        indices: list[int] = []
        index = self.next
        while len(indices) < size:
            if inside := [end for first, end in self.skip if first <= index < end]:
                index = max(inside)
                continue
            if not isinstance(self.order, Order) or not is_left_out(self.order, index, self.cuts):
                indices.append(index)
            index += 1
        return np.array(indices)

    def after(self, drawn: npt.NDArray[np.int64], sequence: int, *, comes_again: bool = False) -> Position:
        """Return the position after training on the samples `drawn`, of `sequence` tokens each. `comes_again`: the next
        step trains on the same samples."""
        if comes_again:
            return replace(self, samples=self.samples + len(drawn), tokens=self.tokens + len(drawn) * sequence)
        following = int(drawn[-1]) + 1
        order, cuts = self.order, self.cuts
        is_epoch_over = not isinstance(order, Order) or not cuts or following // order.windows != cuts[0].epoch
        return replace(
            self,
            samples=self.samples + len(drawn),
            tokens=self.tokens + len(drawn) * sequence,
            next=following,
            skip=tuple(span for span in self.skip if span[1] > following),
            cuts=() if is_epoch_over else self.cuts,
        )

    def leaving_out(self, drawn: npt.NDArray[np.int64], sequence: int) -> Position:
        """Return the position after the samples `drawn`, without counting them as trained."""
        return replace(self.after(drawn, sequence), samples=self.samples, tokens=self.tokens)

    def skipping(self, ranges: Sequence[tuple[int, int]]) -> Position:
        """Return the position with these samples left out, too."""
        return replace(self, skip=_merge_ranges([*self.skip, *(span for span in ranges if span[1] > self.next)]))

    def convert_to(self, order: Order, *, same_text: bool) -> Position:
        """Return this position expressed in another order of the samples."""
        old = order if self.order is None else self.order
        if isinstance(old, Blend):  # positions in a blend do not apply to a single source
            return replace(self, order=order, cuts=(), skip=(), next=0)
        if old == order:
            return replace(self, order=order)
        if old.goes_on_in(order) and self.next * old.sequence == order.first and not self.cuts:
            return replace(self, order=order, skip=(), next=order.first // order.sequence)
        if not same_text:  # positions in another text do not apply
            return replace(self, order=order, cuts=(), skip=(), next=self.next * old.sequence // order.sequence)
        epoch, place = divmod(self.next, old.windows)
        cut = EpochCut(old, epoch, self.next, tuple(span for span in self.skip if span[0] < (epoch + 1) * old.windows))
        cuts = (*self.cuts, cut) if place or cut.skip else ()
        return replace(self, order=order, skip=(), next=epoch * order.windows, cuts=cuts[-MAX_CUTS:])

    def continue_in_blend(self, order: Blend, move: Move) -> Position:
        """Return this position in the blend of a build: each source continues where it was.

        `move`: converts the position of one source to another order of its samples.
        """
        old = self.order
        if isinstance(old, Blend) and old.goes_on_in(order):
            return self
        begins = not isinstance(old, Blend) or old.phase != order.phase
        ends = order.counts(order.samples) if order.samples is not None else (None,) * len(order.shares)
        shares = []
        for share, samples in zip(order.shares, ends, strict=True):
            position = self._position_of_source(share.name)
            begin = _begin(position, share.order) if begins else None
            if begin is not None:
                shares.append(limit_to_phase(share, begin, samples))
                continue
            moved = move(position, share.order)
            shares.append(replace(share, first=moved.next, cuts=moved.cuts))
        return replace(self, order=replace(order, shares=tuple(shares), first=self.next), skip=(), cuts=())

    def _position_of_source(self, name: str) -> Position:
        """Return the position of a source of the blend, with its drawn tokens; at its beginning if it is new."""
        if not isinstance(self.order, Blend):
            return Position()
        following = self.order.nexts(self.next).get(name)
        if following is None:
            return Position()
        share = next(candidate for candidate in self.order.shares if candidate.name == name)
        is_cut = bool(share.cuts) and following // share.order.windows == share.cuts[0].epoch
        tokens = following * share.order.sequence
        return Position(0, tokens, following, (), share.order, share.cuts if is_cut else ())

    def convert_at_same_share(self, order: Order) -> Position:
        """Return the position in an order with other windows at which the same share of the epoch was drawn."""
        windows = self.order.windows if isinstance(self.order, Order) else order.windows
        epoch, place = divmod(self.next, windows)
        following = epoch * order.windows + place * order.windows // windows
        return replace(self, order=order, cuts=(), skip=(), next=following)

    def unavoidable_tokens(self) -> tuple[int, int] | None:
        """Return (tokens skipped, tokens repeated) in this epoch because windows changed; None if costly to count."""
        if not isinstance(self.order, Order) or not self.cuts:
            return 0, 0
        if max(self.order.windows, *(cut.order.windows for cut in self.cuts)) > _MAX_COUNTED:
            return None
        skipped = repeated = 0
        for index in range(self.next, (self.next // self.order.windows + 1) * self.order.windows):
            tokens_seen = num_seen(self.order, index, self.cuts)
            if 2 * tokens_seen > self.order.sequence:
                skipped += self.order.sequence - tokens_seen
            else:
                repeated += tokens_seen
        return skipped, repeated

    @property
    def epochs(self) -> dict[str, dict[str, float]]:
        """Metrics of the sources of a blend: how often each was read."""
        return {"epochs": self.order.epochs(self.next)} if isinstance(self.order, Blend) else {}

    # ---- JSON

    def to_json(self) -> dict[str, Any]:
        """Return the position as a checkpoint's manifest has it."""
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "next": self.next,
            "skip": [list(span) for span in self.skip],
            "order": self.order.to_json() if self.order else None,
            "cuts": [cut.to_json() for cut in self.cuts],
        }

    @staticmethod
    def from_json(value: Any) -> Position:
        """Parse the result of `to_json`. ValueError for anything else."""
        demand = order_json.demand
        demand(isinstance(value, dict) and value.keys() == vars(Position()).keys())
        samples, tokens, following = (order_json.count(value[name]) for name in ("samples", "tokens", "next"))
        order = None if value["order"] is None else order_json.order(value["order"])
        cuts = order_json.cuts(value["cuts"])
        demand(not cuts or isinstance(order, Order))
        demand(not isinstance(order, Blend) or order.first <= following)
        return Position(samples, tokens, following, order_json.ranges(value["skip"]), order, cuts)


def _begin(position: Position, order: Order) -> int | None:
    """Return the token, counted over all epochs of a source, at which a phase begins: after the phase before, at a
    whole piece. None if windows changed, or there are no phases."""
    old = position.order
    if not order.piece or position.cuts:
        return None
    if old is None:
        return 0
    if not isinstance(old, Order) or old.end is None or not old.has_pieces_of(order):
        return None
    return -(-max(old.end, position.tokens) // order.piece) * order.piece


def _merge_ranges(spans: Sequence[tuple[int, int]]) -> Ranges:
    result: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((first, end))
    return tuple(result)
