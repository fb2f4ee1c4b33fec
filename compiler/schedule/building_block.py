"""Orders of a V that repeat one block of six units: the steps of one micro-batch, the same for all, six units apart.

Pipeline Parallelism with Controllable Memory (arXiv 2405.15362): how long a block holds its activations decides what a
rank holds. Every F and I takes a unit, and each rank runs F, F, I, I and two W in six. A micro-batch takes a fixed
number of units from one rank to the next, its pace, on each of the four legs of its way: forward down the V and up
again, backward down and up. Where it turns it may have to wait, so that no two of a rank's steps meet. Ranks run their
steps in this order, each as soon as it can.
"""

from __future__ import annotations

from itertools import pairwise

from compiler.schedule.folded import down_and_up
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import F0, F1, I0, I1, Slot, Token, W

_PERIOD = 6  # units of a block: F, I and W of both stages of a rank


def repeated(
    name: str, num_ranks: int, num_micro_batches: int, pace: tuple[int, int, int, int], waits: tuple[int, int, int]
) -> Schedule:
    """The schedule of placement `v` that repeats a block; ValueError for P or N < 1.

    `pace`: units from rank to rank on the four legs. `waits`: units lost at the three turns between them.
    """
    P, N = num_ranks, num_micro_batches
    if P < 1 or N < 1:
        raise ValueError(f"{name} needs at least 1 rank and 1 micro-batch, got {P} and {N}")
    return down_and_up(name, P, N, lambda rank: _slots(N, _block(P, rank, pace, waits)))


def _block(
    num_ranks: int, rank: int, pace: tuple[int, int, int, int], waits: tuple[int, int, int]
) -> tuple[tuple[int, Token], ...]:
    """When the rank runs its four steps on the first micro-batch."""
    hops, down, up, back_down, back_up = num_ranks - 1, *pace
    turn = (down + up) * hops + 1 + waits[0]  # the last forward, on rank 0
    back = turn + 1 + waits[1]  # the first backward there
    end = back + (back_down + back_up) * hops + 1 + waits[2]  # and the last
    return (down * rank, F0), (turn - up * rank, F1), (back + back_down * rank, I1), (end - back_up * rank, I0)


def _slots(num_micro_batches: int, block: tuple[tuple[int, Token], ...]) -> list[Slot]:
    """The block repeated; W where it leaves a unit free, and what is left of them at the end."""
    assert len({start % _PERIOD for start, _ in block}) == len(block), "two steps of a rank at once"
    slots: list[Slot] = []
    deferred = 0
    turns = sorted({0, *(start // _PERIOD + more for start, _ in block for more in (0, num_micro_batches))})
    for turn, end in pairwise(turns):  # between them the same steps run
        runs = {start % _PERIOD: token for start, token in block if 0 <= turn - start // _PERIOD < num_micro_batches}
        while turn < end:
            more, change = _six_units(runs, {start % _PERIOD for start, _ in block}, deferred)
            times = end - turn if change == 0 or (change > 0 and deferred >= _PERIOD) else 1
            slots += more * times
            deferred += change * times
            turn += times
    return slots + [(W,)] * deferred


def _six_units(runs: dict[int, Token], taken: set[int], due: int) -> tuple[list[Slot], int]:
    """What runs in six units, W in those that the block leaves free; and how many more of them are due then."""
    slots: list[Slot] = []
    deferred = due
    for unit in range(_PERIOD):
        if (token := runs.get(unit)) is not None:
            slots.append((token,))
            deferred += token in (I0, I1)
        elif deferred and unit not in taken:
            slots.append((W,))
            deferred -= 1
    return slots, deferred - due
