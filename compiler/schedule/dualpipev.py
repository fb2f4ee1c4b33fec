"""DualPipeV: DualPipe folded into a V, with one copy of the weights (the `dualpipev.py` of DeepSeek's DualPipe).

Every P >= 1 and N >= 2P, odd ones too. 2P+1 activations on every rank, of half a rank's layers each.
"""

from __future__ import annotations

from compiler.schedule.eight_steps import eight_steps
from compiler.schedule.folded import down_and_up
from compiler.schedule.schedule import Schedule


def dualpipev(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The eight steps on every rank of a V; ValueError for sizes it does not have, with what to change."""
    P, N = num_ranks, num_micro_batches
    if P < 1:
        raise ValueError(f"dualpipev needs at least 1 rank, got {P}")
    if N < 2 * P:
        raise ValueError(f"dualpipev on {P} ranks needs at least {2 * P} micro-batches, got {N}: use {2 * P}, or zbv")
    return down_and_up("dualpipev", P, N, lambda rank: eight_steps(P, N, rank))
