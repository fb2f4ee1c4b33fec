"""Simulated annealing of rows by small changes, which minimizes the makespan plus the mean end of the rows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from compiler.schedule.solver import compiled
from compiler.schedule.solver.problem import (
    MOST_CHUNKS,
    NUM_TOKENS,
    B,
    F,
    I,
    ScheduleProblem,
    Slots,
    W,
    pair,
    tokens_of,
)
from compiler.schedule.solver.timing import (
    FIXED,
    TimedRow,
    Timing,
    change_row,
    is_longer,
    line_of,
    retime_rows,
    sort_by_time,
    timing_of,
)

# --- Small changes to a row of slots, or None if a change is not possible. timing.py checks the results

TOKENS = tuple(tokens_of(slot) if slot < FIXED else () for slot in range(2 * FIXED))
Draw = Callable[[], float]  # uniform in [0, 1)
Offered = frozenset[int]
Change = tuple[list[int], int, int]  # (new slots of the row, the first that differs, number of equal ones at the end)


def change(slots: list[int], position: int, draw: Draw, offered: Offered) -> Change | None:
    """A random change at a slot, with fixed probabilities of each kind of change."""
    kind = draw()
    if kind < 0.35:
        return shift(slots, position, draw)
    if kind < 0.8:
        return move_token(slots, position, draw, offered)
    if kind < 0.85:
        return swap_chunks(slots, position, draw, offered)
    return split(slots, position, draw) or unsplit(slots, position, draw)


def shift(slots: list[int], position: int, draw: Draw) -> Change | None:
    """Move a slot."""
    if slots[position] >= FIXED:
        return None
    return _replace_and_insert(slots, position, (), slots[position], position + _distance(draw))


def move_token(slots: list[int], position: int, draw: Draw, offered: Offered) -> Change | None:
    """Move a token out of its slot: to a slot of its own, to a lone token, or in exchange with one of a pair."""
    tokens = TOKENS[slots[position]]
    if not tokens:
        return None
    index = int(draw() * len(tokens))
    token, remaining = tokens[index], tokens[:index] + tokens[index + 1 :]
    target = position + _distance(draw)
    if draw() < 0.25:
        return _replace_and_insert(slots, position, remaining, token, target)
    target_tokens = TOKENS[slots[target]] if 0 <= target < len(slots) and target != position else ()
    if not target_tokens:
        return None
    new = slots[:]
    if len(target_tokens) == 1:
        new[target] = pair(token, target_tokens[0])
        if new[target] not in offered:
            return None
        new[position : position + 1] = remaining
    else:
        back = int(draw() * 2)
        new[target] = pair(token, target_tokens[1 - back])
        new[position] = pair(target_tokens[back], remaining[0]) if remaining else target_tokens[back]
        if new[target] not in offered or new[position] not in offered:
            return None
    return new, min(position, target), len(slots) - 1 - max(position, target)


def swap_chunks(slots: list[int], position: int, draw: Draw, offered: Offered) -> Change | None:
    """Exchange a token with the next one of the same kind and another chunk."""
    tokens = TOKENS[slots[position]]
    if not tokens:
        return None
    token = tokens[int(draw() * len(tokens))]
    kind = token // MOST_CHUNKS
    step = 1 if draw() < 0.5 else -1
    target = position + step
    while 0 <= target < len(slots) and token < W:
        match = next(
            (
                candidate
                for candidate in TOKENS[slots[target]]
                if candidate != token and candidate // MOST_CHUNKS == kind
            ),
            None,
        )
        if match is not None:
            new = slots[:]
            for place, old, replacement in ((position, token, match), (target, match, token)):
                new[place] = _replace_token(slots[place], old, replacement)
                if new[place] not in offered:
                    return None
            return new, min(position, target), len(slots) - 1 - max(position, target)
        target += step
    return None


def split(slots: list[int], position: int, draw: Draw) -> Change | None:
    """Turn a B into an I and a later W."""
    tokens = TOKENS[slots[position]]
    back = next((token for token in tokens if B <= token < I), None)
    if back is None:
        return None
    target = min(len(slots), position + 1 + int(draw() * draw() * len(slots)))
    if _is_inside(slots, target):
        return None
    new = slots[:]
    new[position] = _replace_token(slots[position], back, back + MOST_CHUNKS)
    new.insert(target, W)
    return new, position, len(slots) - target


def unsplit(slots: list[int], position: int, draw: Draw) -> Change | None:
    """Turn an I into a B, and remove the next W."""
    tokens = TOKENS[slots[position]]
    back = next((token for token in tokens if I <= token < W), None)
    if back is None:
        return None
    target = next((index for index in range(position + 1, len(slots)) if W in TOKENS[slots[index]]), None)
    if target is None:
        return None
    new = slots[:]
    new[position] = _replace_token(slots[position], back, back - MOST_CHUNKS)
    remaining = list(TOKENS[slots[target]])
    remaining.remove(W)
    new[target : target + 1] = remaining
    return new, position, len(slots) - 1 - target


def _replace_and_insert(
    slots: list[int], position: int, remaining: tuple[int, ...], moved: int, gap: int
) -> Change | None:
    """Replace the slot `position` by `remaining`, and insert `moved` before the slot `gap`.

    Both numbers are of the old row.
    """
    if not 0 <= gap <= len(slots) or (gap in (position, position + 1) and not remaining) or _is_inside(slots, gap):
        return None
    new = slots[:]
    if gap > position:
        new.insert(gap, moved)
        new[position : position + 1] = remaining
        return new, position, len(slots) - gap
    new[position : position + 1] = remaining
    new.insert(gap, moved)
    return new, gap, len(slots) - 1 - position


def _is_inside(slots: list[int], gap: int) -> bool:
    return 0 < gap < len(slots) and slots[gap - 1] >= FIXED and slots[gap] >= FIXED


def _replace_token(slot: int, old: int, new: int) -> int:
    """The slot with one token replaced by another."""
    if slot < NUM_TOKENS:
        return new
    first, second = TOKENS[slot]
    return pair(new, second) if first == old else pair(first, new)


def _distance(draw: Draw) -> int:
    """A random distance in either direction: mostly a few slots, at most 40."""
    far = 1 + int(40 * draw() ** 5)
    return far if draw() < 0.5 else -far


# --- Simulated annealing of the rows: makespan plus the mean end of the rows, under the cap
#
# The second term is essential, as most single changes leave the makespan unchanged. Most accepted changes leave both
# terms unchanged, which lets the search move through plateaus.

# Microseconds to draw a change, to make one to a row, and to time a slot.
_DRAWN, _CHANGED, _SLOT = 3.0, 10.0, 0.2
_ONE_ROW = 0.3  # share of changes to a single row; the others are also made to the next rows
_GO_ON = 0.9  # probability of another row after that
_LATE, _HOW_LATE = 0.5, 0.25  # share of changes near the end of a row, where most is gained; exponent of their place
_NEAR = 12  # slots within which an equal slot is searched for in the next row
_SORTED = 50  # accepted changes between two sorts of the order in which slots are timed
RowChange = tuple[list[TimedRow], int, int, dict[int, int]]  # see _change_rows


@dataclass(frozen=True)
class FoundSlots:
    """Slots with their makespan and value."""

    makespan: int
    value: int  # (makespan + mean end of the rows) times the number of rows
    slots: Slots


def anneal(
    problem: ScheduleProblem, slots: Slots, work: float, heat: tuple[float, float], seed: int, goal: int
) -> FoundSlots:
    """The best slots on a walk from legal ones. `work`: counted microseconds of one core.

    The temperature falls from the first heat to the second, in multiples of F. The walk stops at a makespan of `goal`.
    Equal arguments give equal results.
    """
    temperature, cooling = heat[0] * problem.times[0][F] * problem.num_rows, math.log(heat[1] / heat[0]) / work
    found = compiled.anneal(problem, slots, work, temperature, cooling, seed, goal)
    return FoundSlots(*found) if found else anneal_in_python(problem, slots, work, temperature, cooling, seed, goal)


def anneal_in_python(
    problem: ScheduleProblem, slots: Slots, work: float, temperature: float, cooling: float, seed: int, goal: int
) -> FoundSlots:
    """What `compiled` does in C, for machines without a C compiler. Returns the same slots, thirty times as slowly."""
    draw = random.Random(seed).random
    lines = [line for row, row_slots in enumerate(slots) if (line := line_of(problem, row, row_slots))]
    timing = timing_of(problem, lines)
    assert timing is not None, "the start is not legal"
    value, num_rows = _value(timing), problem.num_rows
    best = FoundSlots(timing.makespan, value, slots)
    spent, accepted = 0.0, 0
    while spent < work and best.makespan > goal:
        spent += _DRAWN
        candidate = _change_rows(problem, lines, timing, draw)
        if candidate is None:
            continue
        new, first, last, added = candidate
        allowed = -math.log(1 - draw()) * temperature * math.exp(cooling * spent)
        limit = timing.makespan + int(allowed / num_rows)
        begin, size = timing.marks[first].num_timed, len(timing.order)
        spent += _CHANGED * len(added)
        if last < len(timing.marks):
            spent += _SLOT * (timing.marks[last].num_timed - begin)
            if is_longer(problem, timing, new, first, last, added, limit):
                continue
        spent += _SLOT * (size - begin)
        timed = retime_rows(problem, timing, new, first, limit)
        if timed is None or (new_value := _value(timed)) - value > allowed:
            continue
        spent += _SLOT * size  # for its tails
        lines, timing, value, accepted = new, timed, new_value, accepted + 1
        if accepted % _SORTED == 0:
            timing = sort_by_time(problem, timing, lines)
        if (timing.makespan, value) < (best.makespan, best.value):
            best = FoundSlots(timing.makespan, value, tuple(tuple(line.slots) for line in lines))
    return best


def _value(timing: Timing) -> int:
    return len(timing.ends) * timing.makespan + sum(timing.ends)


def _change_rows(
    problem: ScheduleProblem, lines: list[TimedRow], timing: Timing, draw: Callable[[], float]
) -> RowChange | None:
    """The timed rows with a random change to one of them, or the same change to some neighbouring ones.

    Also returns the marks between which they differ, where the second may be one beyond the last mark, and by changed
    row how many more slots it has.
    """
    marks = timing.marks
    row, first, last = int(draw() * problem.num_rows), len(marks) - 1, 0
    place = draw() ** _HOW_LATE if draw() < _LATE else draw()
    position = min(int(place * len(lines[row].slots)), len(lines[row].slots) - 1)  # a root may be rounded to 1
    go_on, step = _GO_ON if draw() > _ONE_ROW else 0.0, 1 if draw() < 0.5 else -1
    candidate, added = lines[:], {}
    drawn: list[float] = []

    def draws() -> float:  # recorded, so that a change can be repeated in another row
        drawn.append(draw())
        return drawn[-1]

    while True:
        old = lines[row]
        new = change(old.slots, position, draws, problem.offered[row])
        line = new and change_row(problem, row, old, *new)
        if not new or not line:
            return None
        candidate[row] = line
        added[row] = len(line.slots) - len(old.slots)
        while marks[first].positions[row] > new[1]:
            first -= 1
        end = len(old.slots) - new[2]
        if not problem.has_equal_w and line.chunks is not old.chunks:  # the time of a later W may change
            last = len(marks)
        while last < len(marks) and marks[last].positions[row] < end:
            last += 1
        next_row = row + step
        if draw() >= go_on or not 0 <= next_row < problem.num_rows:
            break
        next_position = _nearest_equal_slot(
            lines[next_row].slots,
            old.slots[position],
            marks[first].positions[next_row] + position - marks[first].positions[row],
        )
        if next_position is None:
            break
        row, position, draws = next_row, next_position, chain(drawn, iter(draw, None)).__next__  # repeat the change
    return candidate, first, last, added


def _nearest_equal_slot(slots: list[int], slot: int, around: int) -> int | None:
    """The nearest place with an equal slot; None if there is none near `around`."""
    near = (place for far in range(_NEAR) for place in (around - far, around + far) if 0 <= place < len(slots))
    return next((place for place in near if slots[place] == slot), None)
