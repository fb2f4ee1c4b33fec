"""Schedules from lists of slots, which have no micro-batches: one list per rank.

The k-th F, and the k-th B or I, of a chunk is for its k-th micro-batch. A W takes the oldest deferred gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import overload

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import Home, Slot, Token, homes
from runtime.contract.actions import Action, Pair, Step

_action = lru_cache(maxsize=1 << 16)(Action)  # the sizes of a batch-size ramp share most actions


@dataclass(frozen=True, eq=False)
class SlotRow(Sequence[Step]):
    """The steps of a rank, made from its slots when they are first read: long schedules are timed without them.

    `homes` and `firsts`: by chunk, its stage and direction, and its first micro-batch. A row equals every sequence of
    the same steps.
    """

    slots: Sequence[Slot]
    homes: tuple[Home, ...]
    firsts: tuple[int, ...]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The slots with their micro-batches."""
        return tuple(
            Pair(*actions) if len(actions) == 2 else actions[0]
            for actions in _actions(self.slots, self.homes, self.firsts)
        )

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Step, ...]: ...
    def __getitem__(self, index: int | slice) -> Step | tuple[Step, ...]:
        return self.steps[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.steps == tuple(other)

    def __hash__(self) -> int:
        return hash(self.steps)


def number_micro_batches(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    placement: StagePlacement,
    slots_of: Callable[[int], Sequence[Slot]],
) -> Schedule:
    """The schedule whose rank r runs `slots_of(r)`.

    For an odd N under `bidirectional`, the slots may be for N + 1: the last micro-batch is dropped.
    """
    P, N, turn = num_ranks, num_micro_batches, placement.turn(num_micro_batches)
    rows: list[Sequence[Step]] = []
    shared: dict[Slot, Slot] = {}  # one copy of equal slots, as a long schedule has millions of them
    for rank in range(P):
        slots, chunks = slots_of(rank), homes(placement, P, rank)
        firsts = tuple(turn if direction else 0 for _, direction in chunks)
        row = SlotRow(tuple(map(shared.setdefault, slots, slots)), chunks, firsts)
        rows.append(tuple(_first_steps(row, N)) if placement == BIDIRECTIONAL and N % 2 else row)
    return Schedule(name, P, N, placement, tuple(rows))


def name_weights(slots: Sequence[Slot]) -> Sequence[Slot]:
    """The slots with a chunk for each W that takes the oldest deferred gradient of any chunk."""
    distinct = set(slots)
    if not any(("W", -1) in slot for slot in distinct):
        return slots
    kept = {slot for slot in distinct if all(kind in "FB" for kind, _ in slot)}
    deferred: deque[int] = deque()  # chunks
    return [slot if slot in kept else tuple([_name_weight(token, deferred) for token in slot]) for slot in slots]


def _name_weight(token: Token, deferred: deque[int]) -> Token:
    """The token with its chunk. `deferred`: the chunks of I whose W are still to come, oldest first."""
    kind, chunk = token
    if kind == "I":
        deferred.append(chunk)
    if kind != "W":
        return token
    if chunk < 0:
        return "W", deferred.popleft()
    deferred.remove(chunk)
    return token


def _first_steps(row: SlotRow, num_micro_batches: int) -> Iterator[Step]:
    """The steps of a row on the first micro-batches."""
    for actions in _actions(row.slots, row.homes, row.firsts):
        remaining = [action for action in actions if action.micro_batch < num_micro_batches]
        if remaining:
            yield Pair(*remaining) if len(remaining) == 2 else remaining[0]


def _actions(slots: Sequence[Slot], chunks: Sequence[Home], firsts: Sequence[int]) -> Iterator[list[Action]]:
    """The actions of each slot."""
    next_forward, next_backward = list(firsts), list(firsts)
    deferred = [deque[int]() for _ in chunks]  # micro-batches
    for slot in name_weights(slots):
        actions = []
        for kind, chunk in slot:
            if kind == "W":
                micro_batch = deferred[chunk].popleft()
            else:
                counter = next_forward if kind == "F" else next_backward
                micro_batch = counter[chunk]
                counter[chunk] += 1
                if kind == "I":
                    deferred[chunk].append(micro_batch)
            actions.append(_action(kind, chunks[chunk][0], micro_batch))
        yield actions
