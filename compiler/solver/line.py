"""One row of slots, made ready to be timed: per slot its time and events, and what was done before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from compiler.solver.problem import NEVER, NOBODY, NOW, Problem
from compiler.solver.tokens import W1, W, slot_of, tokens_of

FIXED = 128  # added to a slot that moves must leave alone
Step = tuple[int, int, int, int, int]  # time, the two events it waits for, the two it makes
State = tuple[int, int, int, int, int, int]  # done F0 F1 B0 B1, input gradients whose W is due, activations held
END: Step = (0, NEVER, NEVER, NOBODY, NOBODY)  # so that a row at its end waits


@dataclass(slots=True)
class Line:
    """A row. `steps` (with END), `states` and `work` (time of all slots before) have an item more than `slots`."""

    slots: list[int]
    steps: list[Step]
    states: list[State]
    work: list[int]


def line_of(problem: Problem, row: int, slots: Sequence[int]) -> Line | None:
    """The line of a whole row; None where it is not legal on its own, or holds more than the cap."""
    nothing = Line([], [END], [(0, 0, 0, 0, 0, 0)], [0])
    line = changed(problem, row, nothing, list(slots), 0, 0)
    full = (problem.count,) * problem.num_chunks + (0,) * (2 - problem.num_chunks)
    return line if line and line.states[-1] == (*full, *full, 0, 0) else None


def changed(problem: Problem, row: int, old: Line, slots: list[int], first: int, kept: int) -> Line | None:
    """The line of `slots`, which are those of `old` before `first`, and at the last `kept`, and as many of each token.

    None where it would hold more than the cap, or run a backward before its forward or a W before its I.
    """
    count, cap, times = problem.count, problem.cap, problem.times[row]
    needs, makes = problem.needs[row], problem.makes[row]
    timed = slots
    if not problem.one_w:
        timed, kept = _with_far_w(slots), 0
    last = len(slots) - kept
    *done, due, held = old.states[first]
    work = old.work[first]
    steps: list[Step] = []
    states: list[State] = []
    works: list[int] = []
    for at in range(first, last):
        states.append((done[0], done[1], done[2], done[3], due, held))
        works.append(work)
        slot, time = slots[at] & 127, times[timed[at] & 127]
        work += time
        if slot < 2:
            held += 1
            k = done[slot]
            if held > cap or k >= count:
                return None
            done[slot] = k + 1
            steps.append((time, needs[slot] + k, NOW, makes[slot] + k, NOBODY))
        elif slot < W:
            if slot < 4:
                held -= 1
                kind = slot
            else:
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
            waits, made, freed, split = [], [], 0, 0
            for token in (slot & 7, (slot >> 3) - 1):  # the later kind first: a pair's actions may not need each other
                if token == W:
                    if not due:
                        return None
                    due -= 1
                    freed += 1
                    waits.append(NOW)
                    made.append(NOBODY)
                    continue
                kind = token if token < 4 else token - 2
                k = done[kind]
                if token < 2:
                    held += 1
                    if k >= count:
                        return None
                elif k >= done[kind - 2]:
                    return None
                elif token < 4:
                    freed += 1
                else:
                    split += 1
                done[kind] = k + 1
                waits.append(needs[kind] + k)
                made.append(makes[kind] + k)
            if held > cap:
                return None
            held -= freed
            due += split
            steps.append((time, waits[0], waits[1], made[0], made[1]))
    end = len(old.slots) - kept
    works.append(work)
    more = work - old.work[end]
    return Line(
        slots,
        old.steps[:first] + steps + old.steps[end:],
        old.states[:first]
        + states
        + ([(done[0], done[1], done[2], done[3], due, held)] if not kept else old.states[end:]),
        old.work[:first] + works + ([w + more for w in old.work[end + 1 :]] if more else old.work[end + 1 :]),
    )


def _with_far_w(slots: Sequence[int]) -> list[int]:
    """The slots with W1 for each W of the far chunk."""
    split: deque[int] = deque()
    result = []
    for slot in slots:
        tokens = [(W1 if split and split.popleft() else W) if token == W else token for token in tokens_of(slot & 127)]
        split.extend(token & 1 for token in tokens if token in (4, 5))
        result.append(slot_of(tokens))
    return result
