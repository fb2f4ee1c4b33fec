"""Orders of ranks that hold two stages, written without micro-batches, on the two placements that have such ranks.

A rank is `depth` ranks away from the end where micro-batches enter in direction 0, its near one; in direction 1, the
far one, it is met as far from the other end. Under `v` the directions are the way down and the way up of the same
micro-batches; under `bidirectional` they are two halves of the micro-batches, and rank r and its mirror P-1-r run the
same list, each seeing as near the direction that enters on its side. So an order of a V of P/2 ranks and N/2
micro-batches is, unfolded, one of P ranks and N micro-batches, which takes as long.

The k-th F, and the k-th B or I, of a direction is on its k-th micro-batch; W takes the oldest gradient still deferred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

from compiler.schedules.schedule import Schedule
from compiler.stage_placement import BIDIRECTIONAL, V
from runtime.actions import Action, ActionKind, Pair, Step, actions_of

Token = tuple[ActionKind, int]  # kind and direction; a W of direction -1 is of either
Slot = tuple[Token, ...]  # one token, or the two of a pair
F0: Token = ("F", 0)
F1: Token = ("F", 1)
B0: Token = ("B", 0)
B1: Token = ("B", 1)
I0: Token = ("I", 0)
I1: Token = ("I", 1)
W0: Token = ("W", 0)
W1: Token = ("W", 1)
W: Token = ("W", -1)


_action = lru_cache(maxsize=1 << 16)(Action)  # the sizes of a growing batch have most of them in common


def down_and_up(
    name: str, num_ranks: int, num_micro_batches: int, slots_of: Callable[[int], Sequence[Slot]]
) -> Schedule:
    """The schedule of placement `v` whose rank r runs `slots_of(r)`: every micro-batch goes down and comes back up."""
    P = num_ranks
    ranks = tuple(_numbered(slots_of(rank), (rank, 2 * P - 1 - rank), (0, 0)) for rank in range(P))
    return Schedule(name, P, num_micro_batches, V, ranks)


def both_ways(name: str, num_ranks: int, num_micro_batches: int, slots_of: Callable[[int], Sequence[Slot]]) -> Schedule:
    """The `bidirectional` schedule whose ranks r and P-1-r run `slots_of(r)`: half the micro-batches from each end.

    Of an odd N, the slots are those of N + 1, and the last micro-batch, of direction 1, is left out.
    """
    P, N = num_ranks, num_micro_batches
    half, ranks = (N + 1) // 2, []
    for rank in range(P):
        near = min(rank, P - 1 - rank)
        first = (0, half) if rank == near else (half, 0)
        steps = _numbered(slots_of(near), (near, P - 1 - near), first)
        ranks.append(tuple(left for step in steps for left in _before(step, N)) if N % 2 else steps)
    return Schedule(name, P, N, BIDIRECTIONAL, tuple(ranks))


def _before(step: Step, num_micro_batches: int) -> tuple[Step, ...]:
    """What is left of a step without the micro-batches that there are not."""
    left = tuple(action for action in actions_of(step) if action.micro_batch < num_micro_batches)
    return (step,) if len(left) == len(actions_of(step)) else left


def _numbered(slots: Sequence[Slot], stages: tuple[int, int], first: tuple[int, int]) -> tuple[Step, ...]:
    """The slots as steps: of each direction the stage, and its first micro-batch."""
    next_forward, next_backward = list(first), list(first)
    deferred: tuple[deque[tuple[int, Action]], ...] = (deque(), deque())  # with the number of the backward

    def action(token: Token) -> Action:
        kind, direction = token
        if kind == "W":
            queues = [queue for queue in deferred if queue] if direction < 0 else [deferred[direction]]
            return min(queues).popleft()[1]  # that with the older head
        counter = next_forward if kind == "F" else next_backward
        taken = _action(kind, stages[direction], counter[direction])
        counter[direction] += 1
        if kind == "I":
            deferred[direction].append((sum(next_backward), _action("W", taken.stage, taken.micro_batch)))
        return taken

    return tuple(Pair(action(slot[0]), action(slot[1])) if len(slot) == 2 else action(slot[0]) for slot in slots)
