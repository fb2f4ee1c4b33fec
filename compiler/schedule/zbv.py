"""ZBV: two stages a rank in the form of a V, without a bubble where F = I = W (Zero Bubble, arXiv 2401.10241, §6).

Every P >= 1 and N >= 1, placement `v`, at most 2P activations, of half a rank's layers each. The hand-made order of the
paper begins at 2P-1 micro-batches; fewer run as those would, without the missing ones.

`prompt`: in the drain too, every weight gradient comes right behind its backward, and the step is a little longer. What
is kept for a weight gradient is more than what is kept for a backward that computes its values anew: with 30
micro-batches on 16 ranks a rank of DeepSeek-V3 holds 1.7 times as much where they are put off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from compiler.schedule.folded import both_ways, down_and_up
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import F0, F1, I0, I1, W0, W1, Slot, Token


def zbv(num_ranks: int, num_micro_batches: int, prompt: bool = False) -> Schedule:
    """Warm-up, steady state and drain of each rank; ValueError for P or N < 1."""
    P, N = num_ranks, num_micro_batches
    if P < 1 or N < 1:
        raise ValueError(f"zbv needs at least 1 rank and 1 micro-batch, got {P} and {N}")
    return down_and_up("zbv", P, N, lambda rank: _slots(P, N, rank, prompt))


def zbv_both_ways(num_ranks: int, num_micro_batches: int, prompt: bool = False) -> Schedule:
    """ZBV of half the ranks, unfolded: what a `bidirectional` plan runs where DualPipe has too few micro-batches.

    Every even P and N >= 1, at most P activations; ValueError otherwise. Not a choice of the language.
    """
    P, N = num_ranks, num_micro_batches
    if P < 2 or P % 2 or N < 1:
        raise ValueError(f"zbv from both ends needs an even number of ranks and 1 micro-batch, got {P} and {N}")
    return both_ways("zbv", P, N, lambda depth: _slots(P // 2, (N + 1) // 2, depth, prompt))


def _slots(num_ranks: int, num_micro_batches: int, rank: int, prompt: bool) -> tuple[Slot, ...]:
    """Direction 0 is the way down, 1 the way up."""
    below, above = num_ranks - rank, rank  # ranks from here to the turn, this one among them; ranks before it
    N = max(num_micro_batches, 2 * num_ranks - 1)
    order = [F0] * (2 * below - 1)  # the first micro-batch is on its way to the last rank and back
    order += [F1, F0] * above
    order += [F1, I1, W1] * below  # the first backwards of the way up; those of the way down are not there yet
    left = N - (2 * below - 1) - above  # forwards of the way down
    order += [F0, I0, W0, F1, I1, W1] * left
    order += [I0, W0, F1, I1, W1] * (N - above - below - left)  # and of the way up
    order += [I0, W0, I1, W1] * above if prompt else [I0, I1] * above
    order += [I0, W0] * below
    order += [] if prompt else [W1] * above + [W0] * above
    return tuple((token,) for token in (_first(order, num_micro_batches) if num_micro_batches < N else order))


def _first(order: Sequence[Token], most: int) -> Iterator[Token]:
    """The first `most` of each token."""
    seen: Counter[Token] = Counter()
    for token in order:
        seen[token] += 1
        if seen[token] <= most:
            yield token
