"""V-Min: a third of the activations of 1f1b, with a bubble between those of V-Half and 1f1b (arXiv 2405.15362).

Every P >= 1 and N >= 1, placement `v`, at most 2 ((P + 4) // 3) activations, of half a rank's layers each. A
micro-batch goes from rank to rank without a wait.
"""

from __future__ import annotations

from compiler.schedule.building_block import repeated
from compiler.schedule.schedule import Schedule


def vmin(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The block that is over soonest; ValueError for P or N < 1."""
    waits = (0, 0, 0) if num_ranks % 3 else (2, 0, 2)
    return repeated("vmin", num_ranks, num_micro_batches, (1, 1, 1, 1), waits)
