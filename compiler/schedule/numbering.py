"""Schedules from lists of slots, which have no micro-batches: one list per rank.

The k-th F, and the k-th B or I, of a chunk is for its k-th micro-batch. A W takes the oldest deferred gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import Slot, Token, homes
from runtime.contract.actions import Action, Pair, Step

_action = lru_cache(maxsize=1 << 16)(Action)  # the sizes of a batch-size ramp share most actions


def number_micro_batches(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    placement: StagePlacement,
    slots_of: Callable[[int], Sequence[Slot]],
) -> Schedule:
    """The schedule whose rank r runs `slots_of(r)`. For odd N, the slots may be for N + 1: the last one is dropped."""
    P, N, turn = num_ranks, num_micro_batches, placement.turn(num_micro_batches)
    ranks: list[Sequence[Step]] = []
    for rank in range(P):
        chunks = homes(placement, P, rank)
        stages, firsts = [stage for stage, _ in chunks], [turn if direction else 0 for _, direction in chunks]
        ranks.append(tuple(_steps(slots_of(rank), stages, firsts, N)))
    return Schedule(name, P, N, placement, tuple(ranks))


def _steps(
    slots: Sequence[Slot], stages: Sequence[int], firsts: Sequence[int], num_micro_batches: int
) -> Iterator[Step]:
    """The slots as steps. `stages` and `firsts`: the stage and the first micro-batch of each chunk."""
    next_forward, next_backward = list(firsts), list(firsts)
    deferred = [deque[tuple[int, Action]]() for _ in stages]  # (number of the backward, W)

    def action(token: Token) -> Action:
        kind, chunk = token
        if kind == "W":
            queues = [queue for queue in deferred if queue] if chunk < 0 else [deferred[chunk]]
            return min(queues).popleft()[1]  # the queue with the older head
        counter = next_forward if kind == "F" else next_backward
        next_action = _action(kind, stages[chunk], counter[chunk])
        counter[chunk] += 1
        if kind == "I":
            deferred[chunk].append((sum(next_backward), _action("W", next_action.stage, next_action.micro_batch)))
        return next_action

    for slot in slots:
        actions = [next_action for token in slot if (next_action := action(token)).micro_batch < num_micro_batches]
        if actions:
            yield Pair(*actions) if len(actions) == 2 else actions[0]
