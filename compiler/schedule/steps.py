"""The steps of a rank in numbers, 4 or 8 bytes each: what a large schedule is kept in, and looked at all at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.slots import Slot, homes
from runtime.contract.actions import KINDS, Action, Pair, Step

F, B, I, W = range(4)  # places of KINDS
Codes = NDArray[np.int32]  # of actions, see `LazySteps`


class LazySteps(Sequence[Step]):
    """Steps that become actions where one asks for them.

    `codes`: [step, 2], or [step, 1] if none is a pair: (micro_batch · stages + stage) · 4 + kind; a lone action is
    followed by -1.
    """

    def __init__(self, codes: Codes, num_stages: int) -> None:
        self.codes, self.num_stages = codes, num_stages

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, at: int) -> Step: ...
    @overload
    def __getitem__(self, at: slice) -> LazySteps: ...
    def __getitem__(self, at: int | slice) -> Step | LazySteps:
        if isinstance(at, slice):
            return LazySteps(self.codes[at], self.num_stages)
        at = range(len(self))[at]
        return next(iter(self[at : at + 1]))

    def __iter__(self) -> Iterator[Step]:
        parts = (self.kinds.ravel(), self.stages.ravel(), self.micro_batches.ravel())
        actions = zip(*(part.tolist() for part in parts), strict=True)
        for step in zip(*[actions] * self.codes.shape[1], strict=False):
            first, *second = (Action(KINDS[kind], stage, number) for kind, stage, number in step if number >= 0)
            yield Pair(first, *second) if second else first

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazySteps):
            return self.num_stages == other.num_stages and np.array_equal(self.codes, other.codes)
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    @property
    def kinds(self) -> Codes:
        """Kinds, as `codes`; of what is not there, W."""
        return self.codes % 4

    @property
    def stages(self) -> Codes:
        """Stages, as `codes`; of what is not there, the last one."""
        return self.codes // 4 % self.num_stages

    @property
    def micro_batches(self) -> Codes:
        """Micro-batches, as `codes`; of what is not there, -1."""
        return self.codes // (4 * self.num_stages)

    @property
    def there(self) -> NDArray[np.bool_]:
        """Whether there is an action, as `codes`."""
        return self.codes >= 0

    def distinct(self, by_micro_batch: bool) -> tuple[list[Step], Sequence[int]]:
        """The steps that differ in what they do, one of each; by step, which of them it is like."""
        codes = self.codes if by_micro_batch else np.where(self.there, self.codes % (4 * self.num_stages), -1)
        both = codes[:, 0].astype(np.int64) << 32 | (codes[:, -1].astype(np.int64) + 1)
        _, first, which = np.unique(both, return_index=True, return_inverse=True)
        return list(LazySteps(self.codes[first], self.num_stages)), array("q", which.tobytes())

    def before(self, num_micro_batches: int) -> LazySteps:
        """What is left without the micro-batches from that one on."""
        return LazySteps(_left(np.where(self.micro_batches < num_micro_batches, self.codes, -1)), self.num_stages)

    def peak(self, parts: int, freed: dict[str, int]) -> int:
        """The most that is held, where a forward takes so many parts and the end of a kind frees some."""
        taken = parts * ((self.kinds == F) & self.there).sum(axis=1)
        back = (np.array([freed.get(kind, 0) for kind in "FBIW"])[self.kinds] * self.there).sum(axis=1)
        held = np.cumsum(taken - back)
        return int((held + back).max(initial=0))


def steps_of_slots(
    slots: Sequence[Slot], stages: Sequence[int], firsts: Sequence[int], num_micro_batches: int, num_stages: int
) -> LazySteps:
    """The slots as steps (numbering.py): of each chunk the stage, and its first micro-batch.

    W name their chunk, all of a rank or none.
    """
    alphabet = list(dict.fromkeys(slots))
    number = {slot: at for at, slot in enumerate(alphabet)}
    width = max(map(len, alphabet), default=1)
    table = np.full((len(alphabet), width, 2), -1)  # [slot, action, kind and chunk]
    for at, slot in enumerate(alphabet):
        for k, (kind, chunk) in enumerate(slot):
            table[at, k] = KINDS.index(kind), chunk
    which = np.fromiter(map(number.__getitem__, slots), np.int64, len(slots))
    kinds, chunks = (table[:, :, part][which].ravel() for part in (0, 1))
    batches, stage = np.full(len(kinds), -1), np.zeros(len(kinds), np.int64)
    for chunk in range(len(stages)):
        here = chunks == chunk
        for made in (here & (kinds == F), here & ((kinds == B) | (kinds == I))):
            batches[made] = firsts[chunk] + np.arange(np.count_nonzero(made))
            stage[made] = stages[chunk]
        _take(here & (kinds == I), here & (kinds == W), batches, stage)
    if ((kinds == W) & (chunks < 0)).any():
        _take(kinds == I, kinds == W, batches, stage)
    runs = (kinds >= 0) & (batches < num_micro_batches)
    codes = np.where(runs, (batches * num_stages + stage) * 4 + kinds, -1).astype(np.int32)
    return LazySteps(_left(codes.reshape(-1, width)), num_stages)


def _left(codes: Codes) -> Codes:
    """Codes of steps of which some actions are -1 now: those that have any, each with its first action first."""
    if codes.shape[1] == 2:
        codes = np.where(codes[:, :1] < 0, codes[:, ::-1], codes)
    return codes[codes[:, 0] >= 0]


def _take(
    inward: NDArray[np.bool_], weights: NDArray[np.bool_], batches: NDArray[np.int64], stage: NDArray[np.int64]
) -> None:
    """The k-th of some W is that of the k-th of some I."""
    for values in (batches, stage):
        values[weights] = values[inward][: np.count_nonzero(weights)]


def is_legal(actions: Sequence[LazySteps], num_micro_batches: int, placement: StagePlacement) -> bool:
    """Whether the steps of all ranks are legal for sure (`Schedule.check`): no pair is of one micro-batch."""
    P, N = len(actions), num_micro_batches
    cells, turn = placement.num_stages(P) * N, placement.turn(N)
    place = np.full(4 * cells, -1)  # by code, the step of its rank
    for rank, steps in enumerate(actions):
        batches, there = steps.micro_batches, steps.there
        is_pair_of_one = batches.shape[1] == 2 and (batches[:, 0] == batches[:, 1]).any()
        if is_pair_of_one or batches.max(initial=0) >= N:
            return False
        here = np.zeros(there.shape, np.bool_)
        for stage, direction in homes(placement, P, rank):
            here |= (steps.stages == stage) & ((batches >= turn) == direction)
        codes, numbers = steps.codes[there], np.nonzero(there)[0]
        if not here[there].all() or len(np.unique(codes)) < len(codes) or (place[codes] >= 0).any():
            return False
        place[codes] = numbers
    forward, backward, inward, weights = place.reshape(-1, 4).T
    whole = (forward >= 0) & (backward > forward) & (inward < 0) & (weights < 0)
    split = (forward >= 0) & (backward < 0) & (inward > forward) & (weights > inward)
    return bool((whole | split).all())
