"""The eight steps of DualPipe (DeepSeek-V3, arXiv 2412.19437, §3.2.1), as one rank of a V runs them.

`dualpipev` is this order on placement `v`, `dualpipe` on `bidirectional`: DualPipe on P ranks and N micro-batches is
DualPipeV on P/2 ranks and N/2 micro-batches, unfolded (folded.py).
"""

from __future__ import annotations

from compiler.schedule.slots import B0, B1, F0, F1, I0, I1, Slot, W


def eight_steps(num_ranks: int, num_micro_batches: int, depth: int) -> tuple[Slot, ...]:
    """The slots of the rank at `depth` of the V, whose ranks and micro-batches these are; N >= 2P, any P."""
    P, N, r = num_ranks, num_micro_batches, depth
    rest = P - r - 1
    slots: list[Slot] = []
    for _ in range(2 * rest):  # 1: fill from the near end
        slots += [(F0,)]
    for _ in range(r + 1):  # 2: both directions
        slots += [(F0,), (F1,)]
    for _ in range(rest):  # 3: first backwards of the far direction; W fills the wait for the next forward
        slots += [(I1,), (W,), (F1,)]
    for i in range(N - 2 * P + r + 1):  # 4: the steady state; the last rank gains by not pairing its first two
        slots += [(F0,), (B1,)] if i == 0 and rest == 0 else [(F0, B1)]
        slots += [(F1, B0)]
    for _ in range(rest):  # 5: no near forwards are left
        slots += [(B1,), (F1, B0)]
    for i in range(2 * (r + 1)):  # 6: drain, B1 B0 …; the second half defers its weight gradients
        far, near = (B1, B0) if i <= r else (I1, I0)
        slots += [(near,) if i % 2 else (far,)]
    for _ in range(rest):  # 7: W fills the wait for the last near backwards
        slots += [(W,), (I0,)]
    for _ in range(r + 1):  # 8: what is still deferred
        slots += [(W,)]
    return tuple(slots)
