"""Times of rows of slots, computed again only from the first slot that a change can move.

The times equal those of `simulate`, in whole numbers, and take a fraction of a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from compiler.schedule.solver.problem import (
    FIRST,
    MOST_CHUNKS,
    NEVER,
    NOBODY,
    NOW,
    NUM_CODES,
    NUM_TOKENS,
    B,
    I,
    ScheduleProblem,
    W,
    chunk_of,
    slot_of,
    tokens_of,
)

# --- One row of slots, prepared for timing: for each slot its time, its events, and the state before it

FIXED = NUM_CODES  # added to a slot that moves must not change
EventStep = tuple[int, int, int, int, int]  # time, the two events it waits for, the two it makes
# By chunk F done, and by chunk B and I done; then parts of activations held, I done, W due.
State = tuple[int, ...]
END: EventStep = (0, NEVER, NEVER, NOBODY, NOBODY)  # a row at its end waits for ever


@dataclass(slots=True)
class TimedRow:
    """A row. `steps`, `states` and `work` have one item more than `slots`."""

    slots: list[int]
    steps: list[EventStep]  # the last one is END
    states: list[State]
    work: list[int]  # time of all slots before
    chunks: list[int]  # the chunk of each I, if the time of a W depends on it


def line_of(problem: ScheduleProblem, row: int, slots: Sequence[int]) -> TimedRow | None:
    """The `TimedRow` of a whole row; None if the row alone is illegal or exceeds the cap."""
    empty = TimedRow([], [END], [(0,) * (2 * problem.num_chunks + 3)], [0], [])
    line = change_row(problem, row, empty, list(slots), 0, 0)
    full = problem.counts[row] * 2
    return line if line and line.states[-1][:-3] == full and line.states[-1][-1] == 0 else None


def change_row(
    problem: ScheduleProblem, row: int, old: TimedRow, slots: list[int], first: int, num_equal: int
) -> TimedRow | None:
    """The `TimedRow` of `slots`: the tokens of `old`, with equal slots before `first` and in the last `num_equal`.

    Returns None if it exceeds the cap, or has a backward before its forward or a W before its I.
    """
    counts, cap, times = problem.counts[row], problem.caps[row], problem.times[row]
    needs, makes, C = problem.needs[row], problem.makes[row], len(problem.counts[row])
    parts, w_parts, freed_by_i = problem.activation_parts, problem.w_parts, problem.activation_parts - problem.w_parts
    last = len(slots) - num_equal
    *done, live, split, due = old.states[first]
    one_w, chunks, before = problem.has_equal_w, old.chunks[:split], split
    work = old.work[first]
    steps: list[EventStep] = []
    states: list[State] = []
    works: list[int] = []
    for index in range(first, last):
        states.append((*done, live, split, due))
        works.append(work)
        slot = slots[index] % FIXED
        if one_w:
            time = times[slot]
        else:
            tokens = tokens_of(slot)
            time = times[_of_chunks(tokens, chunks[split - due :]) if W in tokens else slot]
            chunks += [chunk_of(token) for token in tokens if I <= token < W]
        work += time
        if slot < B:
            live += parts
            k = done[slot]
            if live > cap or k >= counts[slot]:
                return None
            done[slot] = k + 1
            steps.append((time, needs[slot] + k, NOW, makes[slot] + k, NOBODY))
        elif slot < W:
            chunk = slot % MOST_CHUNKS
            if slot < I:
                live -= parts
            else:
                live -= freed_by_i
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
            live -= w_parts
            steps.append((time, NOW, NOW, NOBODY, NOBODY))
        else:
            waits, produced, freed, num_split = [], [], 0, 0
            # The later kind first, so that no action of a pair can depend on the other.
            for token in (slot % NUM_TOKENS, slot // NUM_TOKENS - 1):
                if token == W:
                    if not due:
                        return None
                    due -= 1
                    freed += w_parts
                    waits.append(NOW)
                    produced.append(NOBODY)
                    continue
                chunk = token % MOST_CHUNKS
                if token < B:
                    kind = chunk
                    k = done[kind]
                    live += parts
                    if k >= counts[chunk]:
                        return None
                else:
                    kind = C + chunk
                    k = done[kind]
                    if k >= done[chunk]:
                        return None
                    if token < I:
                        freed += parts
                    else:
                        freed += freed_by_i
                        num_split += 1
                done[kind] = k + 1
                waits.append(needs[kind] + k)
                produced.append(makes[kind] + k)
            if live > cap:
                return None
            live -= freed
            split += num_split
            due += num_split
            steps.append((time, waits[0], waits[1], produced[0], produced[1]))
    end = len(old.slots) - num_equal
    if not one_w and num_equal:
        if chunks[before:] != old.chunks[before : old.states[end][-2]]:  # then later W are for other chunks
            return change_row(problem, row, old, slots, first, 0)
        chunks = old.chunks
    works.append(work)
    added = work - old.work[end]
    return TimedRow(
        slots,
        old.steps[:first] + steps + old.steps[end:],
        old.states[:first] + states + (old.states[end:] if num_equal else [(*done, live, split, due)]),
        old.work[:first] + works + ([w + added for w in old.work[end + 1 :]] if added else old.work[end + 1 :]),
        chunks,
    )


def _of_chunks(tokens: Sequence[int], chunks: Sequence[int]) -> int:
    """The slot with each W written with the chunk of the next due gradient."""
    next_chunks = iter(chunks)
    return slot_of(W + next(next_chunks, 0) if token == W else token for token in tokens)


# --- timing

_GAP, _EVENTS = 16, 64  # slots between two marks: at least _GAP, and one per _EVENTS events, as a mark copies these


@dataclass(slots=True)
class Mark:
    """The state before a slot is timed."""

    num_timed: int  # slots that are timed so far
    events: list[int]  # times of events; -1: not yet
    positions: list[int]  # by row, the index of its next slot
    clocks: list[int]  # by row, its time


@dataclass(slots=True)
class Timing:
    """Times of rows, with marks from which timing can restart.

    `order` has the row of each slot in the order in which they were timed. A slot comes after everything it waits for,
    so a change does not move slots before it in this order.
    """

    order: list[int]
    marks: list[Mark]
    ends: list[int]  # of the rows
    # For the last marks, last first: by row, the time from the start of its next slot to the end of all. Made lazily.
    tails: list[list[int]] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)  # by event, that time from its first reader, at the last of `tails`

    @property
    def makespan(self) -> int:
        return max(self.ends)


def timing_of(problem: ScheduleProblem, lines: Sequence[TimedRow]) -> Timing | None:
    """The timing of rows; None if rows wait for each other for ever."""
    rows = range(problem.num_rows)
    events = [-1] * problem.num_events
    events[NOW : FIRST + problem.count] = [0] * (FIRST + problem.count - NOW)
    first = Timing([], [Mark(0, events, [0 for _ in rows], [0 for _ in rows])], [])
    timing = retime_rows(problem, first, lines, 0, None)
    return timing and sort_by_time(problem, timing, lines)


def starts_of(problem: ScheduleProblem, timing: Timing, lines: Sequence[TimedRow]) -> list[list[int]]:
    """The start of each slot of each row."""
    events = timing.marks[0].events[:]
    starts: list[list[int]] = [[] for _ in lines]
    clocks = [0] * len(lines)
    for row in timing.order:
        time, wait, wait_also, makes, makes_also = lines[row].steps[len(starts[row])]
        start = max(clocks[row], events[wait], events[wait_also])
        starts[row].append(start)
        clocks[row] = start + time
        events[makes] = clocks[row] + problem.delay[makes]
        events[makes_also] = clocks[row] + problem.delay[makes_also]
    return starts


def sort_by_time(problem: ScheduleProblem, timing: Timing, lines: Sequence[TimedRow]) -> Timing:
    """The same timing with its slots in order of their starts, and with evenly spaced marks."""
    starts = [iter(row) for row in starts_of(problem, timing, lines)]
    timed = sorted((next(starts[row]), index, row) for index, row in enumerate(timing.order))
    zero = timing.marks[0]
    marks = [Mark(index, zero.events, zero.positions, zero.clocks) for index in range(0, len(timed), gap_of(problem))]
    result = retime_rows(problem, Timing([row for _, _, row in timed], marks, []), lines, 0, None)
    assert result and result.ends == timing.ends
    return result


def gap_of(problem: ScheduleProblem) -> int:
    """The least number of slots between two marks."""
    return max(_GAP, problem.num_events // _EVENTS)


def retime_rows(
    problem: ScheduleProblem, old: Timing, lines: Sequence[TimedRow], first: int, limit: int | None
) -> Timing | None:
    """The timing of `lines`, which equal those of `old` up to its mark `first`.

    Returns None if rows wait for each other for ever, or if a row surely ends after `limit`.
    """
    mark = old.marks[first]
    events, positions, clocks = mark.events[:], mark.positions[:], mark.clocks[:]
    delay, rows = problem.delay, range(len(lines))
    steps = [line.steps for line in lines]
    work = [line.work for line in lines]
    total = [line.work[-1] for line in lines]
    order: list[int] = []
    marks = old.marks[:first]
    bounds = [saved.num_timed for saved in old.marks[first:]] + [len(old.order)]
    for begin, end in pairwise(bounds):
        marks.append(Mark(mark.num_timed + len(order), events[:], positions[:], clocks[:]))
        for row in old.order[begin:end]:
            place = positions[row]
            time, wait, wait_also, makes, makes_also = steps[row][place]
            ready = events[wait]
            if ready < 0:
                continue
            ready_also = events[wait_also]
            if ready_also < 0:
                continue
            start = clocks[row]
            if ready > start:
                start = ready
            if ready_also > start:
                start = ready_also
            start += time
            clocks[row] = start
            positions[row] = place + 1
            events[makes] = start + delay[makes]
            events[makes_also] = start + delay[makes_also]
            order.append(row)
        if limit is not None:
            for row in rows:
                if clocks[row] - work[row][positions[row]] + total[row] > limit:
                    return None
    remaining = sum(map(len, work)) - len(lines) - sum(positions)
    while remaining:
        before = remaining
        if not marks or mark.num_timed + len(order) - marks[-1].num_timed >= gap_of(problem):
            marks.append(Mark(mark.num_timed + len(order), events[:], positions[:], clocks[:]))
        for row in rows:
            of_row = steps[row]
            while True:
                time, wait, wait_also, makes, makes_also = of_row[positions[row]]
                ready, ready_also = events[wait], events[wait_also]
                if ready < 0 or ready_also < 0:
                    break
                clocks[row] = max(clocks[row], ready, ready_also) + time
                positions[row] += 1
                events[makes] = clocks[row] + delay[makes]
                events[makes_also] = clocks[row] + delay[makes_also]
                order.append(row)
                remaining -= 1
        if remaining == before:
            return None
    return Timing(old.order[: mark.num_timed] + order, marks, clocks)


def is_longer(
    problem: ScheduleProblem,
    old: Timing,
    lines: Sequence[TimedRow],
    first: int,
    last: int,
    added_slots: dict[int, int],
    limit: int,
) -> bool:
    """Whether `lines` surely end after `limit`, or never. They differ from `old` only between the two marks.

    `added_slots`: by changed row, how many more slots it has. Only slots between the marks `first` and `last` are
    timed, as the rest takes as long as before. False means that the answer is unknown. A slot that waits for one after
    the second mark counts as waiting for ever, which is almost always true.
    """
    begin, end = old.marks[first], old.marks[last]
    events, positions, clocks, delay = begin.events[:], begin.positions[:], begin.clocks[:], problem.delay
    order = old.order[begin.num_timed : end.num_timed]
    for row, count in added_slots.items():
        order += [row] * count
        for _ in range(-count):
            order.pop(len(order) - 1 - order[::-1].index(row))
    steps = [line.steps for line in lines]
    while order:
        later = []
        for row in order:
            time, wait, wait_also, makes, makes_also = steps[row][positions[row]]
            ready = events[wait]
            ready_also = events[wait_also]
            if ready < 0 or ready_also < 0:
                later.append(row)
                continue
            start = clocks[row]
            if ready > start:
                start = ready
            if ready_also > start:
                start = ready_also
            start += time
            clocks[row] = start
            positions[row] += 1
            events[makes] = start + delay[makes]
            events[makes_also] = start + delay[makes_also]
        if len(later) == len(order):
            return True
        order = later
    for row, tail in enumerate(_tails(problem, old, lines, last, added_slots)):
        _, wait, wait_also, _, _ = steps[row][positions[row]]
        if max(clocks[row], events[wait], events[wait_also]) + tail > limit:
            return True
    return False


def _tails(
    problem: ScheduleProblem, timing: Timing, lines: Sequence[TimedRow], mark: int, added_slots: dict[int, int]
) -> list[int]:
    """The tails of the rows at a mark. After it, `lines` equal those of the timing.

    `added_slots`: by row, additional slots before it.
    """
    tails, marks, delay = timing.tails, timing.marks, problem.delay
    if not tails:
        timing.behind = [-lag for lag in delay]  # for events that nobody waits for
    behind = timing.behind
    while len(marks) - len(tails) > mark:
        at_mark = len(marks) - 1 - len(tails)
        if tails:
            end, row_tails = marks[at_mark + 1].num_timed, tails[-1][:]
            positions = [place + added_slots.get(row, 0) for row, place in enumerate(marks[at_mark + 1].positions)]
        else:
            end, row_tails, positions = len(timing.order), [0] * len(lines), [len(line.slots) for line in lines]
        for row in reversed(timing.order[marks[at_mark].num_timed : end]):
            positions[row] -= 1
            time, wait, wait_also, makes, makes_also = lines[row].steps[positions[row]]
            tail = row_tails[row]
            if behind[makes] + delay[makes] > tail:
                tail = behind[makes] + delay[makes]
            if behind[makes_also] + delay[makes_also] > tail:
                tail = behind[makes_also] + delay[makes_also]
            row_tails[row] = behind[wait] = behind[wait_also] = tail + time
        tails.append(row_tails)
    return tails[len(marks) - 1 - mark]
