"""DualPipe and DualPipeV, which overlap forwards and backwards in pairs: the same eight steps on two placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compiler.ir.stage_placement import BIDIRECTIONAL, V
from compiler.schedule.numbering import number_micro_batches
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import B0, B1, F0, F1, I0, I1, Slot, W

# --- The eight steps of DualPipe (DeepSeek-V3, arXiv 2412.19437, §3.2.1), as one rank of a V runs them
#
# `dualpipev` is this order on placement `v`, `dualpipe` on `bidirectional`: DualPipe on P ranks and N micro-batches is
# DualPipeV on P/2 ranks and N/2 micro-batches, unfolded.


def eight_steps(num_ranks: int, num_micro_batches: int, depth: int) -> tuple[Slot, ...]:
    """The slots of the rank at `depth` in a V of these ranks and micro-batches; N >= 2P, any P."""
    P, N, r = num_ranks, num_micro_batches, depth
    behind = P - r - 1
    slots: list[Slot] = []
    for _ in range(2 * behind):  # 1: fill from the near end
        slots += [(F0,)]
    for _ in range(r + 1):  # 2: both directions
        slots += [(F0,), (F1,)]
    for _ in range(behind):  # 3: first backwards of the far direction; W fills the wait for the next forward
        slots += [(I1,), (W,), (F1,)]
    for i in range(N - 2 * P + r + 1):  # 4: the steady state; the last rank is faster without its first pair
        slots += [(F0,), (B1,)] if i == 0 and behind == 0 else [(F0, B1)]
        slots += [(F1, B0)]
    for _ in range(behind):  # 5: no near forwards are left
        slots += [(B1,), (F1, B0)]
    for i in range(2 * (r + 1)):  # 6: drain, B1 B0 …; the second half defers its weight gradients
        far, near = (B1, B0) if i <= r else (I1, I0)
        slots += [(near,) if i % 2 else (far,)]
    for _ in range(behind):  # 7: W fills the wait for the last near backwards
        slots += [(W,), (I0,)]
    for _ in range(r + 1):  # 8: the weight gradients that are still deferred
        slots += [(W,)]
    return tuple(slots)


# --- Orders of ranks that hold two stages, on the two placements that have such ranks
#
# A rank is `depth` ranks away from the end where micro-batches of its near direction enter. Micro-batches of its far
# direction come from the other end. Under `v` the directions are the way down and the way up of the same micro-batches.
# Under `bidirectional` they are two halves of the micro-batches, and ranks r and P-1-r run the same list, each with the
# direction that enters on its side as the near one. So an order of a V of P/2 ranks and N/2 micro-batches, unfolded, is
# an order of P ranks and N micro-batches, which takes as long.


def down_and_up(
    name: str, num_ranks: int, num_micro_batches: int, slots_of: Callable[[int], Sequence[Slot]]
) -> Schedule:
    """The schedule of placement `v` whose rank r runs `slots_of(r)`: every micro-batch goes down and comes back up."""
    return number_micro_batches(name, num_ranks, num_micro_batches, V, slots_of)


def both_ways(name: str, num_ranks: int, num_micro_batches: int, slots_of: Callable[[int], Sequence[Slot]]) -> Schedule:
    """The `bidirectional` schedule whose ranks r and P-1-r run `slots_of(r)`: half the micro-batches from each end.

    Of an odd N, the slots are those of N + 1, and the last micro-batch, of direction 1, is left out.
    """
    P = num_ranks
    return number_micro_batches(
        name, P, num_micro_batches, BIDIRECTIONAL, lambda rank: slots_of(min(rank, P - 1 - rank))
    )


# --- DualPipe: a bidirectional pipeline whose forwards and backwards overlap in pairs (DeepSeek-V3, arXiv 2412.19437)
#
# Every even P and even N >= 2P. Two copies of every stage, P+1 activations on every rank.


def dualpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The eight steps of DualPipe on every rank. Raises ValueError for sizes it does not have, with what to change."""
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


# --- DualPipeV: DualPipe folded into a V, with one copy of the weights (the `dualpipev.py` of DeepSeek's DualPipe)
#
# Every P >= 1 and N >= 2P, odd ones too. 2P+1 activations on every rank, of half a rank's layers each.


def dualpipev(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The eight steps on every rank of a V. Raises ValueError for sizes it does not have, with what to change."""
    P, N = num_ranks, num_micro_batches
    if P < 1:
        raise ValueError(f"dualpipev needs at least 1 rank, got {P}")
    if N < 2 * P:
        raise ValueError(f"dualpipev on {P} ranks needs at least {2 * P} micro-batches, got {N}: use {2 * P}, or zbv")
    return down_and_up("dualpipev", P, N, lambda rank: eight_steps(P, N, rank))
