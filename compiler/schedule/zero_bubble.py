"""Schedules that fill bubbles with weight gradients: ZB1P, ZBH2, interleaved zero bubble, ZBV, V-Half and V-Min."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from compiler.ir.stage_placement import ONE_STAGE
from compiler.schedule.dualpipe import both_ways, down_and_up
from compiler.schedule.numbering import number_micro_batches
from compiler.schedule.one_f_one_b import around_the_ring
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import F0, F1, I0, I1, W0, W1, Slot, Token, W

# --- ZB1P, the hand-made schedule ZB-H1: 1f1b with weight gradients in the bubble (Zero Bubble, arXiv 2401.10241, §3.1)
#
# Every P >= 1 and N >= 1, placement `loop(1)`. No rank holds more than P activations, as many as the first rank of
# 1f1b: rank r defers each W by r micro-batches, by which its warm-up is shorter.


def zb1p(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Rank r: min(N, P-1-r) forwards, then F, I and the W of r micro-batches ago in turn; ValueError for P or N < 1."""
    return deferred_schedule("zb1p", num_ranks, num_micro_batches, 1)


def deferred_schedule(name: str, num_ranks: int, num_micro_batches: int, times: int) -> Schedule:
    """Rank r: min(N, `times` · (P-1-r)) forwards, then F, I and the W of `times` · r micro-batches ago in turn."""
    if num_ranks < 1 or num_micro_batches < 1:
        raise ValueError(f"{name} needs at least 1 rank and 1 micro-batch, got {num_ranks} and {num_micro_batches}")
    return number_micro_batches(
        name,
        num_ranks,
        num_micro_batches,
        ONE_STAGE,
        lambda rank: _zb1p_slots(num_micro_batches, times * (num_ranks - 1 - rank), times * rank),
    )


def _zb1p_slots(num_micro_batches: int, warm_up: int, late: int) -> list[Slot]:
    N, warm_up = num_micro_batches, min(num_micro_batches, warm_up)
    slots: list[Slot] = [(F0,)] * warm_up
    for k in range(N):
        if warm_up + k < N:
            slots += [(F0,)]
        slots += [(I0,)]
        if k >= late:
            slots += [(W0,)]
    return slots + [(W0,)] * min(N, late)


# --- ZBH2, the hand-made schedule ZB-H2: no bubble after the fill if F = I = W (Zero Bubble, arXiv 2401.10241, §3.2)
#
# Every P >= 1 and N >= 1, placement `loop(1)`, at most 2P - 1 activations. Each rank warms up with as many forwards as
# fit before its first backward can start. It defers one W more for each forward by which its warm-up is shorter.


def zbh2(num_ranks: int, num_micro_batches: int) -> Schedule:
    """zb1p with twice the warm-up, and W deferred by twice as many micro-batches; ValueError for P or N < 1."""
    return deferred_schedule("zbh2", num_ranks, num_micro_batches, 2)


# --- Interleaved zero bubble: rank r defers r weight gradients, and fills the bubble of the drain with them
#
# Every P >= 1, N >= 1 and v >= 2 chunks, placement `loop(v)` (torch's ScheduleInterleavedZeroBubble; arXiv 2401.10241).


def interleaved_zb(num_ranks: int, num_micro_batches: int, chunks: int) -> Schedule:
    """Split backwards with deferred weight gradients; ValueError for P or N < 1, chunks < 2."""
    return around_the_ring("interleaved_zb", num_ranks, num_micro_batches, chunks, _split)


def _split(forwards: list[Token], backwards: list[Token], first_group: int, behind: int, before: int) -> Iterator[Slot]:
    warm_up = min(len(forwards), first_group + behind)
    yield from ((forward,) for forward in forwards[:warm_up])
    for index, (_, chunk) in enumerate(backwards):
        if warm_up + index < len(forwards):
            yield (forwards[warm_up + index],)
        yield (("I", chunk),)
        if index >= before:
            yield (("W", backwards[index - before][1]),)
    yield from ((("W", chunk),) for _, chunk in backwards[max(0, len(backwards) - before) :])


# --- ZBV: two stages per rank in the form of a V, without a bubble if F = I = W (Zero Bubble, arXiv 2401.10241, §6)
#
# Every P >= 1 and N >= 1, placement `v`, at most 2P activations, each of half a rank's layers. The hand-made order of
# the paper needs 2P-1 micro-batches; with fewer, the actions of the missing ones are left out.
#
# With `prompt`, every weight gradient comes right after its backward in the drain too, and the step is a little longer.
# The values that a deferred weight gradient needs take more memory than those of a backward that recomputes: with 30
# micro-batches on 16 ranks, a rank of DeepSeek-V3 holds 1.7 times as much if weight gradients are deferred.


def zbv(num_ranks: int, num_micro_batches: int, prompt: bool = False) -> Schedule:
    """Warm-up, steady state and drain of each rank; ValueError for P or N < 1."""
    P, N = num_ranks, num_micro_batches
    if P < 1 or N < 1:
        raise ValueError(f"zbv needs at least 1 rank and 1 micro-batch, got {P} and {N}")
    return down_and_up("zbv", P, N, lambda rank: _zbv_slots(P, N, rank, prompt))


def zbv_both_ways(num_ranks: int, num_micro_batches: int, prompt: bool = False) -> Schedule:
    """ZBV of half the ranks, unfolded: a `bidirectional` plan runs it if there are too few micro-batches for DualPipe.

    Every even P and N >= 1, at most P activations; ValueError otherwise. The language has no name for it.
    """
    P, N = num_ranks, num_micro_batches
    if P < 2 or P % 2 or N < 1:
        raise ValueError(f"zbv from both ends needs an even number of ranks and 1 micro-batch, got {P} and {N}")
    return both_ways("zbv", P, N, lambda depth: _zbv_slots(P // 2, (N + 1) // 2, depth, prompt))


def _zbv_slots(num_ranks: int, num_micro_batches: int, rank: int, prompt: bool) -> tuple[Slot, ...]:
    """The slots of a rank. Direction 0 is the way down, and 1 the way up."""
    below, above = num_ranks - rank, rank  # ranks from here to the turn, with this one; ranks before it
    N = max(num_micro_batches, 2 * num_ranks - 1)
    order = [F0] * (2 * below - 1)  # the first micro-batch is on its way to the last rank and back
    order += [F1, F0] * above
    order += [F1, I1, W1] * below  # the first backwards of the way up; those of the way down are not there yet
    num_forwards = N - (2 * below - 1) - above  # forwards of the way down
    order += [F0, I0, W0, F1, I1, W1] * num_forwards
    order += [I0, W0, F1, I1, W1] * (N - above - below - num_forwards)  # and of the way up
    order += [I0, W0, I1, W1] * above if prompt else [I0, I1] * above
    order += [I0, W0] * below
    order += [] if prompt else [W1] * above + [W0] * above
    return tuple((token,) for token in (_first(order, num_micro_batches) if num_micro_batches < N else order))


def _first(order: Sequence[Token], max_count: int) -> Iterator[Token]:
    """The first `max_count` of each token."""
    counts: Counter[Token] = Counter()
    for token in order:
        counts[token] += 1
        if counts[token] <= max_count:
            yield token


# --- Orders of a V that repeat a block of six units: the steps of a micro-batch, equal for all and six units apart
#
# Pipeline Parallelism with Controllable Memory (arXiv 2405.15362): the time for which a block holds its activations
# decides how many a rank holds. Every F and I takes a unit, and each rank runs F, F, I, I and two W in six units. A
# micro-batch takes a fixed number of units from one rank to the next, its pace, on each of the four legs of its way:
# forward down the V and up again, and backward down and up. At its turns it may have to wait, so that no two steps of a
# rank coincide. Ranks run their steps in this order, each as soon as possible.

_PERIOD = 6  # units of a block: F, I and W of both stages of a rank


def repeat_block(
    name: str, num_ranks: int, num_micro_batches: int, pace: tuple[int, int, int, int], waits: tuple[int, int, int]
) -> Schedule:
    """The schedule of placement `v` that repeats a block; ValueError for P or N < 1.

    `pace`: units from rank to rank on the four legs. `waits`: units lost at the three turns between them.
    """
    P, N = num_ranks, num_micro_batches
    if P < 1 or N < 1:
        raise ValueError(f"{name} needs at least 1 rank and 1 micro-batch, got {P} and {N}")
    return down_and_up(name, P, N, lambda rank: _block_slots(N, _block(P, rank, pace, waits)))


def _block(
    num_ranks: int, rank: int, pace: tuple[int, int, int, int], waits: tuple[int, int, int]
) -> tuple[tuple[int, Token], ...]:
    """When the rank runs its four steps on the first micro-batch."""
    hops, down, up, back_down, back_up = num_ranks - 1, *pace
    turn = (down + up) * hops + 1 + waits[0]  # the last forward, on rank 0
    back = turn + 1 + waits[1]  # the first backward there
    end = back + (back_down + back_up) * hops + 1 + waits[2]  # and the last
    return (down * rank, F0), (turn - up * rank, F1), (back + back_down * rank, I1), (end - back_up * rank, I0)


def _block_slots(num_micro_batches: int, block: tuple[tuple[int, Token], ...]) -> list[Slot]:
    """The repeated block, with W in its free units and the remaining W at the end."""
    assert len({start % _PERIOD for start, _ in block}) == len(block), "two steps of a rank at once"
    slots: list[Slot] = []
    deferred = 0
    turns = sorted({0, *(start // _PERIOD + offset for start, _ in block for offset in (0, num_micro_batches))})
    for turn, end in pairwise(turns):  # between them the same steps run
        runs = {start % _PERIOD: token for start, token in block if 0 <= turn - start // _PERIOD < num_micro_batches}
        while turn < end:
            period, change = _six_units(runs, {start % _PERIOD for start, _ in block}, deferred)
            times = end - turn if change == 0 or (change > 0 and deferred >= _PERIOD) else 1
            slots += period * times
            deferred += change * times
            turn += times
    return slots + [(W,)] * deferred


def _six_units(runs: dict[int, Token], reserved_units: set[int], due: int) -> tuple[list[Slot], int]:
    """The slots of six units, with W in the free ones, and the change in the number of due W."""
    slots: list[Slot] = []
    deferred = due
    for unit in range(_PERIOD):
        if (token := runs.get(unit)) is not None:
            slots.append((token,))
            deferred += token in (I0, I1)
        elif deferred and unit not in reserved_units:
            slots.append((W,))
            deferred -= 1
    return slots, deferred - due


# --- V-Half: half of the activations of 1f1b, and about half of its bubble (arXiv 2405.15362, "Controllable Memory")
#
# Every P >= 1 and N >= 1, placement `v`, at most 2 ((P + 2) // 2) activations, of half a rank's layers each. The way up
# has half the pace of the way down, forward and backward.


def vhalf(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The block whose way up takes twice as long; ValueError for P or N < 1."""
    waits = (1, 0, 0) if num_ranks % 2 else (4, 0, 3)
    return repeat_block("vhalf", num_ranks, num_micro_batches, (1, 2, 1, 2), waits)


# --- V-Min: a third of the activations of 1f1b, with a bubble between those of V-Half and 1f1b (arXiv 2405.15362)
#
# Every P >= 1 and N >= 1, placement `v`, at most 2 ((P + 4) // 3) activations, of half a rank's layers each. A
# micro-batch goes from rank to rank without a wait.


def vmin(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The shortest block; ValueError for P or N < 1."""
    waits = (0, 0, 0) if num_ranks % 3 else (2, 0, 2)
    return repeat_block("vmin", num_ranks, num_micro_batches, (1, 1, 1, 1), waits)
