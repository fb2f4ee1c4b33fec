"""Orders of ranks that hold two stages, on the two placements that have such ranks.

A rank is `depth` ranks away from the end where micro-batches enter in direction 0, its near one; in direction 1, the
far one, it is met as far from the other end. Under `v` the directions are the way down and the way up of the same
micro-batches; under `bidirectional` they are two halves of the micro-batches, and rank r and its mirror P-1-r run the
same list, each seeing as near the direction that enters on its side. So an order of a V of P/2 ranks and N/2
micro-batches is, unfolded, one of P ranks and N micro-batches, which takes as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compiler.ir.stage_placement import BIDIRECTIONAL, V
from compiler.schedule.numbering import numbered
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import Slot


def down_and_up(
    name: str, num_ranks: int, num_micro_batches: int, slots_of: Callable[[int], Sequence[Slot]]
) -> Schedule:
    """The schedule of placement `v` whose rank r runs `slots_of(r)`: every micro-batch goes down and comes back up."""
    return numbered(name, num_ranks, num_micro_batches, V, slots_of)


def both_ways(name: str, num_ranks: int, num_micro_batches: int, slots_of: Callable[[int], Sequence[Slot]]) -> Schedule:
    """The `bidirectional` schedule whose ranks r and P-1-r run `slots_of(r)`: half the micro-batches from each end.

    Of an odd N, the slots are those of N + 1, and the last micro-batch, of direction 1, is left out.
    """
    P = num_ranks
    return numbered(name, P, num_micro_batches, BIDIRECTIONAL, lambda rank: slots_of(min(rank, P - 1 - rank)))
