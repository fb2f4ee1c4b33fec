"""One row of slots, made ready to be timed: per slot its time and events, and what was done before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.solver.problem import NEVER, NOBODY, NOW, Problem
from compiler.solver.tokens import I0, W1, W, slot_of, tokens_of

FIXED = 128  # added to a slot that moves must leave alone
Step = tuple[int, int, int, int, int]  # time, the two events it waits for, the two it makes
# Done F0 F1 B0 B1, activations held, I done, W due.
State = tuple[int, int, int, int, int, int, int]
END: Step = (0, NEVER, NEVER, NOBODY, NOBODY)  # so that a row at its end waits


@dataclass(slots=True)
class Line:
    """A row. `steps` (with END), `states` and `work` (time of all slots before) have an item more than `slots`.

    `far` has the chunk of each I, where the time of a W depends on it.
    """

    slots: list[int]
    steps: list[Step]
    states: list[State]
    work: list[int]
    far: list[int]


def line_of(problem: Problem, row: int, slots: Sequence[int]) -> Line | None:
    """The line of a whole row; None where it is not legal on its own, or holds more than the cap."""
    nothing = Line([], [END], [(0, 0, 0, 0, 0, 0, 0)], [0], [])
    line = changed(problem, row, nothing, list(slots), 0, 0)
    full = problem.counts[row] * 2
    return line if line and line.states[-1][:4] == full and line.states[-1][6] == 0 else None


def changed(problem: Problem, row: int, old: Line, slots: list[int], first: int, num_equal: int) -> Line | None:
    """The line of `slots`, which equal those of `old` before `first` and in the last `num_equal`, with equal tokens.

    None where it would hold more than the cap, or run a backward before its forward or a W before its I.
    """
    counts, cap, times = problem.counts[row], problem.cap, problem.times[row]
    needs, makes = problem.needs[row], problem.makes[row]
    last = len(slots) - num_equal
    *done, held, split, due = old.states[first]
    one_w, far, before = problem.one_w, old.far[:split], split
    work = old.work[first]
    steps: list[Step] = []
    states: list[State] = []
    works: list[int] = []
    for at in range(first, last):
        states.append((done[0], done[1], done[2], done[3], held, split, due))
        works.append(work)
        slot = slots[at] % FIXED
        time = times[slot]
        if not one_w:
            tokens = tokens_of(slot)
            if W in tokens:
                time = times[_of_chunks(tokens, far[split - due :])]
            far += [token & 1 for token in tokens if I0 <= token < W]
        work += time
        if slot < 2:
            held += 1
            k = done[slot]
            if held > cap or k >= counts[slot]:
                return None
            done[slot] = k + 1
            steps.append((time, needs[slot] + k, NOW, makes[slot] + k, NOBODY))
        elif slot < W:
            if slot < 4:
                held -= 1
                kind = slot
            else:
                split += 1
                due += 1
                kind = slot - 2
            k = done[kind]
            if k >= done[kind - 2]:
                return None
            done[kind] = k + 1
            steps.append((time, needs[kind] + k, NOW, makes[kind] + k, NOBODY))
        elif slot == W:
            if not due:
                return None
            due -= 1
            held -= 1
            steps.append((time, NOW, NOW, NOBODY, NOBODY))
        else:
            waits, produced, freed, new = [], [], 0, 0
            for token in (slot & 7, (slot >> 3) - 1):  # the later kind first: a pair's actions may not need each other
                if token == W:
                    if not due:
                        return None
                    due -= 1
                    freed += 1
                    waits.append(NOW)
                    produced.append(NOBODY)
                    continue
                kind = token if token < 4 else token - 2
                k = done[kind]
                if token < 2:
                    held += 1
                    if k >= counts[kind]:
                        return None
                elif k >= done[kind - 2]:
                    return None
                elif token < 4:
                    freed += 1
                else:
                    new += 1
                done[kind] = k + 1
                waits.append(needs[kind] + k)
                produced.append(makes[kind] + k)
            if held > cap:
                return None
            held -= freed
            split += new
            due += new
            steps.append((time, waits[0], waits[1], produced[0], produced[1]))
    end = len(old.slots) - num_equal
    if not one_w and num_equal:
        if far[before:] != old.far[before : old.states[end][5]]:  # then W behind are of other chunks
            return changed(problem, row, old, slots, first, 0)
        far = old.far
    works.append(work)
    more = work - old.work[end]
    return Line(
        slots,
        old.steps[:first] + steps + old.steps[end:],
        old.states[:first]
        + states
        + ([(done[0], done[1], done[2], done[3], held, split, due)] if not num_equal else old.states[end:]),
        old.work[:first] + works + ([w + more for w in old.work[end + 1 :]] if more else old.work[end + 1 :]),
        far,
    )


def _of_chunks(tokens: Sequence[int], far: Sequence[int]) -> int:
    """The slot with each W as that of the next chunk."""
    chunks = iter(far)
    return slot_of(W1 if token == W and next(chunks, 0) else token for token in tokens)
