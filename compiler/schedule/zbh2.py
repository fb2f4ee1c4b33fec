"""ZBH2, the hand-made schedule ZB-H2: no bubble behind the fill where F = I = W (Zero Bubble, arXiv 2401.10241, §3.2).

Every P >= 1 and N >= 1, placement `loop(1)`, at most 2P - 1 activations: each rank warms up with as many forwards as
fit until its first backward is there, and defers as many W more as its warm-up is shorter.
"""

from __future__ import annotations

from compiler.schedule.schedule import Schedule
from compiler.schedule.zb1p import deferred


def zbh2(num_ranks: int, num_micro_batches: int) -> Schedule:
    """zb1p with twice the warm-up, and W deferred by twice as many micro-batches; ValueError for P or N < 1."""
    return deferred("zbh2", num_ranks, num_micro_batches, 2)
