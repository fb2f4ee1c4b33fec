"""Schedules without separate weight gradients: forward only, GPipe, 1F1B and interleaved 1F1B."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, loop
from compiler.schedule.numbering import number_micro_batches
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import B0, F0, Slot, Token
from runtime.contract.actions import Action

# --- Forward only, for evaluation: every stage on every micro-batch. The language has no name for it


def forward_only(placement: StagePlacement, num_ranks: int, num_micro_batches: int) -> Schedule:
    """The schedule "evaluate" on any placement and N >= 1; ValueError for other sizes.

    Each rank runs its forwards in the order of `_start`, which is a feasible timetable, so ranks cannot wait in a
    circle.
    """
    stages = placement.num_stages(num_ranks)
    if num_micro_batches < 1:
        raise ValueError(f"evaluation needs at least 1 micro-batch, got {num_micro_batches}")
    starts: list[dict[int, Action]] = [{} for _ in range(num_ranks)]
    for micro_batch in range(num_micro_batches):
        for stage in range(stages):
            rank = placement.rank_of(num_ranks, num_micro_batches, stage, micro_batch)
            start = _start(placement, num_ranks, num_micro_batches, stage, micro_batch)
            assert start not in starts[rank], "two forwards of one rank at one time"
            starts[rank][start] = Action("F", stage, micro_batch)
    actions = tuple(tuple(rank[start] for start in sorted(rank)) for rank in starts)
    return Schedule("evaluate", num_ranks, num_micro_batches, placement, actions)


def _start(placement: StagePlacement, num_ranks: int, num_micro_batches: int, stage: int, micro_batch: int) -> int:
    """The start of a forward that takes one unit: one unit after the previous stage, and at most one per rank."""
    v = placement.loops
    if v:  # groups of P micro-batches go round the ring v times
        group, k = divmod(micro_batch, num_ranks)
        return group * v * num_ranks + k + stage
    # the two stages of a rank differ in parity, so they alternate: the k-th micro-batch of a direction at 2k
    half = (num_micro_batches + 1) // 2
    k = micro_batch % half if placement == BIDIRECTIONAL else micro_batch
    return stage + 2 * k


# --- GPipe: all forwards, then all backwards (arXiv 1811.06965). In between, every rank holds all N activations
#
# Every P >= 1 and N >= 1, placement `loop(1)`.


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Each rank runs F of all micro-batches in order, then B of all in the same order; ValueError for P or N < 1."""
    if num_ranks < 1 or num_micro_batches < 1:
        raise ValueError(f"gpipe needs at least 1 rank and 1 micro-batch, got {num_ranks} and {num_micro_batches}")
    order = ((F0,),) * num_micro_batches + ((B0,),) * num_micro_batches
    return number_micro_batches("gpipe", num_ranks, num_micro_batches, ONE_STAGE, lambda rank: order)


# --- 1F1B: warm up with forwards, then alternate one forward and one backward (PipeDream-flush, arXiv 2006.09503)
#
# Every P >= 1 and N >= 1, placement `loop(1)`. It also runs on a bidirectional plan, where rank s stores stage s too:
# every micro-batch goes in direction 0, and the mirrored copies add no gradient.


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Rank r runs min(N, P-1-r) forwards, pairs of F and B, then the remaining backwards; ValueError for P or N < 1."""
    if num_ranks < 1 or num_micro_batches < 1:
        raise ValueError(f"1f1b needs at least 1 rank and 1 micro-batch, got {num_ranks} and {num_micro_batches}")

    def slots(rank: int) -> tuple[Slot, ...]:
        warm_up = min(num_micro_batches, num_ranks - 1 - rank)
        return ((F0,),) * warm_up + ((F0,), (B0,)) * (num_micro_batches - warm_up) + ((B0,),) * warm_up

    return number_micro_batches("1f1b", num_ranks, num_micro_batches, ONE_STAGE, slots)


# --- Interleaved 1F1B: several smaller stages per rank, for a shorter fill and drain (Megatron, arXiv 2104.04473, §2.2)
#
# Every P >= 1, N >= 1 and v >= 2 chunks, placement `loop(v)`. Micro-batches go round the ring in groups, each v times.
# The paper has groups of P, and P must divide N. Here N is divided into N // P groups of nearly equal size (one if
# N < P), the larger ones first: a larger group after a smaller one would need more warm-up than there was, and ranks
# would wait in a circle.

Slots = Callable[[list[Token], list[Token], int, int, int], Iterator[Slot]]


def interleaved(num_ranks: int, num_micro_batches: int, chunks: int) -> Schedule:
    """1F1B over the forwards and backwards of all chunks of a rank; ValueError for P or N < 1, chunks < 2."""
    return around_the_ring("interleaved", num_ranks, num_micro_batches, chunks, _alternating_slots)


def group_sizes(num_ranks: int, num_micro_batches: int) -> tuple[int, ...]:
    """The sizes of the groups that go round together: at least P, if there are P micro-batches."""
    groups = max(1, num_micro_batches // num_ranks)
    size, larger = divmod(num_micro_batches, groups)
    return (size + 1,) * larger + (size,) * (groups - larger)


def around_the_ring(name: str, num_ranks: int, num_micro_batches: int, chunks: int, slots: Slots) -> Schedule:
    """A schedule of micro-batches that go round in groups.

    `slots` makes the slots of a rank from its forwards and backwards in order, the number of forwards before the first
    group's last chunk, and the numbers of ranks after and before it.
    """
    P, N = num_ranks, num_micro_batches
    if P < 1 or N < 1:
        raise ValueError(f"{name} needs at least 1 rank and 1 micro-batch, got {P} and {N}")
    if chunks < 2:
        raise ValueError(f"{name} needs at least 2 chunks, got {chunks}: use 2, or 1f1b")
    sizes = group_sizes(P, N)
    order = [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]  # of the forwards
    forwards: list[Token] = [("F", chunk) for chunk in order]
    backwards: list[Token] = [("B", chunks - 1 - chunk) for chunk in order]
    # The first backward runs once the first group is in its last chunk and its gradient has reached this rank.
    first_group = (chunks - 1) * sizes[0]
    return number_micro_batches(
        name, P, N, loop(chunks), lambda rank: [*slots(forwards, backwards, first_group, P - 1 - rank, rank)]
    )


def _alternating_slots(
    forwards: list[Token], backwards: list[Token], first_group: int, behind: int, before: int
) -> Iterator[Slot]:
    warm_up = min(len(forwards), first_group + 2 * behind)
    yield from ((forward,) for forward in forwards[:warm_up])
    for index, backward in enumerate(backwards, warm_up):
        if index < len(forwards):
            yield (forwards[index],)
        yield (backward,)


# --- Interleaved 1F1B in pairs: one more forward at the start, so that each backward can overlap with the next forward
#
# That forward is for another micro-batch, so each hides the communication of the other (Megatron's
# `--overlap-moe-expert-parallel-comm`). Every P >= 1, N >= 1 and v >= 2 chunks, placement `loop(v)`.


def interleaved_pairs(num_ranks: int, num_micro_batches: int, chunks: int) -> Schedule:
    """Backwards that overlap with the next forward; ValueError for P or N < 1, chunks < 2."""
    return around_the_ring("interleaved_pairs", num_ranks, num_micro_batches, chunks, _paired_slots)


def _paired_slots(
    forwards: list[Token], backwards: list[Token], first_group: int, behind: int, before: int
) -> Iterator[Slot]:
    warm_up = min(len(forwards), first_group + 2 * behind + 1)
    yield from ((forward,) for forward in forwards[:warm_up])
    for index, backward in enumerate(backwards, warm_up):
        yield (forwards[index], backward) if index < len(forwards) else (backward,)
