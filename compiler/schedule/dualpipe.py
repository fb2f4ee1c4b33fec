"""DualPipe: a bidirectional pipeline whose forwards and backwards overlap in pairs (DeepSeek-V3, arXiv 2412.19437).

Every even P and even N >= 2P. Two copies of every stage, P+1 activations on every rank.
"""

from __future__ import annotations

from compiler.schedule.eight_steps import eight_steps
from compiler.schedule.folded import both_ways
from compiler.schedule.schedule import Schedule


def dualpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The eight steps of DualPipe on every rank; ValueError for sizes it does not have, with what to change."""
    P, N = num_ranks, num_micro_batches
    if P < 2:
        raise ValueError(f"dualpipe needs at least 2 ranks, got {P}: use 2, or 1f1b")
    if P % 2:
        raise ValueError(f"dualpipe needs an even number of ranks, got {P}: use {P - 1} or {P + 1}, or dualpipev")
    if N < 2 * P:
        raise ValueError(f"dualpipe on {P} ranks needs at least {2 * P} micro-batches, got {N}: use {2 * P}, or 1f1b")
    if N % 2:
        raise ValueError(f"dualpipe needs an even number of micro-batches, got {N}: use {N - 1} or {N + 1}")
    return both_ways("dualpipe", P, N, lambda depth: eight_steps(P // 2, N // 2, depth))
