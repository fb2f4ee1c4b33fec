"""DualPipe: a bidirectional pipeline whose forwards and backwards overlap in pairs (DeepSeek-V3, arXiv 2412.19437).

Every even P and even N >= 2P. Direction 0 here is, for each rank, the one whose entry is nearer: seen so, rank r and
its mirror P-1-r run the same list, which depends only on h = min(r, P-1-r).
"""

from __future__ import annotations

from collections import deque

from compiler.schedules.placement import BIDIRECTIONAL
from compiler.schedules.schedule import Schedule
from runtime.actions import Action, ActionKind, Pair, Step, actions_of


def dualpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The eight steps of DualPipe on every rank; ValueError for sizes it does not have, with what to change."""
    P, N = num_ranks, num_micro_batches
    if P < 2:
        raise ValueError(f"dualpipe needs at least 2 ranks, got {P}: use 2, or 1f1b")
    if P % 2:
        raise ValueError(f"dualpipe needs an even number of ranks, got {P}: use {P - 1} or {P + 1}")
    if N < 2 * P:
        raise ValueError(f"dualpipe on {P} ranks needs at least {2 * P} micro-batches, got {N}: use {2 * P}, or 1f1b")
    if N % 2:
        raise ValueError(f"dualpipe needs an even number of micro-batches, got {N}: use {N - 1} or {N + 1}")
    return Schedule("dualpipe", P, N, BIDIRECTIONAL, tuple(_rank_steps(P, N, rank) for rank in range(P)))


class _Rank:
    """Numbers the actions of one rank: the k-th F, and the k-th B or I, of a direction is its k-th micro-batch."""

    def __init__(self, num_ranks: int, num_micro_batches: int, rank: int) -> None:
        half = num_micro_batches // 2
        near = min(rank, num_ranks - 1 - rank)
        self.stage = (near, num_ranks - 1 - near)  # of the near and of the far direction
        first = (0, half) if rank < num_ranks // 2 else (half, 0)
        self.next_forward, self.next_backward = list(first), list(first)
        self.deferred: deque[Action] = deque()

    def F(self, direction: int) -> Action:
        self.next_forward[direction] += 1
        return Action("F", self.stage[direction], self.next_forward[direction] - 1)

    def B(self, direction: int, kind: ActionKind = "B") -> Action:
        self.next_backward[direction] += 1
        return Action(kind, self.stage[direction], self.next_backward[direction] - 1)

    def I(self, direction: int) -> Action:  # noqa: E743
        action = self.B(direction, "I")
        self.deferred.append(action)
        return action

    def W(self) -> Action:
        """The oldest deferred weight gradient."""
        action = self.deferred.popleft()
        return Action("W", action.stage, action.micro_batch)


def _rank_steps(num_ranks: int, num_micro_batches: int, rank: int) -> tuple[Step, ...]:
    P, H, n = num_ranks, num_ranks // 2, num_micro_batches // 2
    h = min(rank, P - 1 - rank)
    do = _Rank(P, num_micro_batches, rank)
    steps: list[Step] = []
    for _ in range(2 * (H - h - 1)):  # 1: fill from the near end
        steps += [do.F(0)]
    for _ in range(h + 1):  # 2: both directions
        steps += [do.F(0), do.F(1)]
    for _ in range(H - h - 1):  # 3: first backwards of the far direction; W fills the wait for the next forward
        steps += [do.I(1), do.W(), do.F(1)]
    for i in range(n - P + h + 1):  # 4: the steady state; the middle ranks gain by not pairing their first two
        pair = Pair(do.F(0), do.B(1))
        steps += actions_of(pair) if i == 0 and h == H - 1 else [pair]
        steps += [Pair(do.F(1), do.B(0))]
    for _ in range(H - h - 1):  # 5: no near forwards are left
        steps += [do.B(1), Pair(do.F(1), do.B(0))]
    for i in range(2 * (h + 1)):  # 6: drain, B1 B0 …; the second half defers its weight gradients
        backward = do.B if i <= h else do.I
        steps += [backward(1 - i % 2)]
    for _ in range(H - h - 1):  # 7: W fills the wait for the last near backwards
        steps += [do.W(), do.I(0)]
    for _ in range(h + 1):  # 8: what is still deferred
        steps += [do.W()]
    return tuple(steps)
