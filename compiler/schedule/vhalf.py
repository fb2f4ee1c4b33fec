"""V-Half: half of the activations of 1f1b, and about half of its bubble (arXiv 2405.15362, "Controllable Memory").

Every P >= 1 and N >= 1, placement `v`, at most 2 ((P + 2) // 2) activations, of half a rank's layers each. The way up
has half the pace of the way down, forward and backward.
"""

from __future__ import annotations

from compiler.schedule.building_block import repeated
from compiler.schedule.schedule import Schedule


def vhalf(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The block that takes twice as long to go up; ValueError for P or N < 1."""
    waits = (1, 0, 0) if num_ranks % 2 else (4, 0, 3)
    return repeated("vhalf", num_ranks, num_micro_batches, (1, 2, 1, 2), waits)
