"""Interleaved 1F1B: smaller stages, several a rank, for a shorter fill and drain (Megatron, arXiv 2104.04473, §2.2).

Every P >= 1, N >= 1 and v >= 2 chunks, placement `loop(v)`. Micro-batches go round the ring in groups, each v times;
the paper has groups of P and wants P to divide N. Here N is divided into N // P groups as equal as can be (one, if
N < P), the larger ones first: a later group that is larger would need more warm-up than there was, and ranks would wait
in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from compiler.ir.stage_placement import loop
from compiler.schedule.numbering import numbered
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import Slot, Token

Slots = Callable[[list[Token], list[Token], int, int, int], Iterator[Slot]]


def interleaved(num_ranks: int, num_micro_batches: int, chunks: int) -> Schedule:
    """1F1B over the forwards and backwards of all chunks of a rank; ValueError for P or N < 1, chunks < 2."""
    return around_the_ring("interleaved", num_ranks, num_micro_batches, chunks, _in_turns)


def group_sizes(num_ranks: int, num_micro_batches: int) -> tuple[int, ...]:
    """How many micro-batches go round together: at least P, if there are so many."""
    groups = max(1, num_micro_batches // num_ranks)
    size, larger = divmod(num_micro_batches, groups)
    return (size + 1,) * larger + (size,) * (groups - larger)


def around_the_ring(name: str, num_ranks: int, num_micro_batches: int, chunks: int, slots: Slots) -> Schedule:
    """A schedule of micro-batches that go round in groups. `slots`: of a rank, from its forwards and backwards in their
    order, the forwards before the first group's last chunk, and the ranks behind and before it."""
    P, N = num_ranks, num_micro_batches
    if P < 1 or N < 1:
        raise ValueError(f"{name} needs at least 1 rank and 1 micro-batch, got {P} and {N}")
    if chunks < 2:
        raise ValueError(f"{name} needs at least 2 chunks, got {chunks}: use 2, or 1f1b")
    sizes = group_sizes(P, N)
    order = [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]  # of the forwards
    forwards: list[Token] = [("F", chunk) for chunk in order]
    backwards: list[Token] = [("B", chunks - 1 - chunk) for chunk in order]
    # The first backward comes when the first group is in its last chunk, and its gradient has come down to this rank.
    first_group = (chunks - 1) * sizes[0]
    return numbered(
        name, P, N, loop(chunks), lambda rank: [*slots(forwards, backwards, first_group, P - 1 - rank, rank)]
    )


def _in_turns(
    forwards: list[Token], backwards: list[Token], first_group: int, behind: int, before: int
) -> Iterator[Slot]:
    warm_up = min(len(forwards), first_group + 2 * behind)
    yield from ((forward,) for forward in forwards[:warm_up])
    for at, backward in enumerate(backwards, warm_up):
        if at < len(forwards):
            yield (forwards[at],)
        yield (backward,)
