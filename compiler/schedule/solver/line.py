"""One row of slots, made ready to be timed: per slot its time and events, and what was done before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.schedule.solver.problem import NEVER, NOBODY, NOW, Problem
from compiler.schedule.solver.tokens import MOST_CHUNKS, NUM_CODES, NUM_TOKENS, B, I, W, chunk_of, slot_of, tokens_of

FIXED = NUM_CODES  # added to a slot that moves must leave alone
Step = tuple[int, int, int, int, int]  # time, the two events it waits for, the two it makes
# By chunk F done, by chunk B and I done; parts of activations held, I done, W due.
State = tuple[int, ...]
END: Step = (0, NEVER, NEVER, NOBODY, NOBODY)  # so that a row at its end waits


@dataclass(slots=True)
class Line:
    """A row. `steps` (with END), `states` and `work` (time of all slots before) have an item more than `slots`.

    `chunks` has the chunk of each I, where the time of a W depends on it.
    """

    slots: list[int]
    steps: list[Step]
    states: list[State]
    work: list[int]
    chunks: list[int]


def line_of(problem: Problem, row: int, slots: Sequence[int]) -> Line | None:
    """The line of a whole row; None where it is not legal on its own, or holds more than the cap."""
    nothing = Line([], [END], [(0,) * (2 * problem.num_chunks + 3)], [0], [])
    line = changed(problem, row, nothing, list(slots), 0, 0)
    full = problem.counts[row] * 2
    return line if line and line.states[-1][:-3] == full and line.states[-1][-1] == 0 else None


def changed(problem: Problem, row: int, old: Line, slots: list[int], first: int, num_equal: int) -> Line | None:
    """The line of `slots`, which equal those of `old` before `first` and in the last `num_equal`, with equal tokens.

    None where it would hold more than the cap, or run a backward before its forward or a W before its I.
    """
    counts, cap, times = problem.counts[row], problem.caps[row], problem.times[row]
    needs, makes, C = problem.needs[row], problem.makes[row], len(problem.counts[row])
    whole, kept, freed_by_i = problem.whole, problem.kept, problem.whole - problem.kept
    last = len(slots) - num_equal
    *done, held, split, due = old.states[first]
    one_w, chunks, before = problem.one_w, old.chunks[:split], split
    work = old.work[first]
    steps: list[Step] = []
    states: list[State] = []
    works: list[int] = []
    for at in range(first, last):
        states.append((*done, held, split, due))
        works.append(work)
        slot = slots[at] % FIXED
        if one_w:
            time = times[slot]
        else:
            tokens = tokens_of(slot)
            time = times[_of_chunks(tokens, chunks[split - due :]) if W in tokens else slot]
            chunks += [chunk_of(token) for token in tokens if I <= token < W]
        work += time
        if slot < B:
            held += whole
            k = done[slot]
            if held > cap or k >= counts[slot]:
                return None
            done[slot] = k + 1
            steps.append((time, needs[slot] + k, NOW, makes[slot] + k, NOBODY))
        elif slot < W:
            chunk = slot % MOST_CHUNKS
            if slot < I:
                held -= whole
            else:
                held -= freed_by_i
                split += 1
                due += 1
            kind = C + chunk
            k = done[kind]
            if k >= done[chunk]:
                return None
            done[kind] = k + 1
            steps.append((time, needs[kind] + k, NOW, makes[kind] + k, NOBODY))
        elif slot == W:
            if not due:
                return None
            due -= 1
            held -= kept
            steps.append((time, NOW, NOW, NOBODY, NOBODY))
        else:
            waits, produced, freed, new = [], [], 0, 0
            # The later kind first: a pair's actions may not need each other.
            for token in (slot % NUM_TOKENS, slot // NUM_TOKENS - 1):
                if token == W:
                    if not due:
                        return None
                    due -= 1
                    freed += kept
                    waits.append(NOW)
                    produced.append(NOBODY)
                    continue
                chunk = token % MOST_CHUNKS
                if token < B:
                    kind = chunk
                    k = done[kind]
                    held += whole
                    if k >= counts[chunk]:
                        return None
                else:
                    kind = C + chunk
                    k = done[kind]
                    if k >= done[chunk]:
                        return None
                    if token < I:
                        freed += whole
                    else:
                        freed += freed_by_i
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
        if chunks[before:] != old.chunks[before : old.states[end][-2]]:  # then W behind are of other chunks
            return changed(problem, row, old, slots, first, 0)
        chunks = old.chunks
    works.append(work)
    more = work - old.work[end]
    return Line(
        slots,
        old.steps[:first] + steps + old.steps[end:],
        old.states[:first] + states + (old.states[end:] if num_equal else [(*done, held, split, due)]),
        old.work[:first] + works + ([w + more for w in old.work[end + 1 :]] if more else old.work[end + 1 :]),
        chunks,
    )


def _of_chunks(tokens: Sequence[int], chunks: Sequence[int]) -> int:
    """The slot with each W as that of the next chunk."""
    next_chunks = iter(chunks)
    return slot_of(W + next(next_chunks, 0) if token == W else token for token in tokens)
