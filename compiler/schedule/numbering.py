"""Schedules from orders of slots, which have no micro-batches: one list a rank, of what it does with its chunks.

The k-th F, and the k-th B or I, of a chunk is on its k-th micro-batch; W takes the oldest gradient still deferred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import Slot, Token, homes
from runtime.contract.actions import Action, Pair, Step

_action = lru_cache(maxsize=1 << 16)(Action)  # the sizes of a growing batch have most of them in common


def numbered(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    placement: StagePlacement,
    slots_of: Callable[[int], Sequence[Slot]],
) -> Schedule:
    """The schedule whose rank r runs `slots_of(r)`. Of an odd N the slots may have a last micro-batch that is none."""
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
    """The slots as steps: of each chunk the stage, and its first micro-batch."""
    next_forward, next_backward = list(firsts), list(firsts)
    deferred = [deque[tuple[int, Action]]() for _ in stages]  # with the number of the backward

    def action(token: Token) -> Action:
        kind, chunk = token
        if kind == "W":
            queues = [queue for queue in deferred if queue] if chunk < 0 else [deferred[chunk]]
            return min(queues).popleft()[1]  # that with the older head
        counter = next_forward if kind == "F" else next_backward
        taken = _action(kind, stages[chunk], counter[chunk])
        counter[chunk] += 1
        if kind == "I":
            deferred[chunk].append((sum(next_backward), _action("W", taken.stage, taken.micro_batch)))
        return taken

    for slot in slots:
        left = [taken for token in slot if (taken := action(token)).micro_batch < num_micro_batches]
        if left:
            yield Pair(*left) if len(left) == 2 else left[0]
