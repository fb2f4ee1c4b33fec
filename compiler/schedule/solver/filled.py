"""Rows without W: the search orders everything else, and W fill the time in which a row would wait.

A W depends on no other row, and nothing waits for it, so its place follows from the rest: in a pause that is long
enough, before a forward that has no room under the cap, and at the end. One change to an order then moves all W at
once, which a walk over whole rows would do one by one. Marked slots keep their W and the number of W before them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiler.schedule.solver.moves import FoundSlots, anneal
from compiler.schedule.solver.problem import FIRST, NOW, B, F, I, ScheduleProblem, Slots, W
from compiler.schedule.solver.timing import FIXED

# Microseconds to draw a change, to make one, and to time a slot.
_DRAWN, _CHANGED, _SLOT = 3.0, 20.0, 0.3
_GAP = 8  # slots of a row between two saved states
_FAR = 6  # the most slots by which a slot is moved
_GO_ON = 0.8  # share of changes that are also made to the next row
_AT_ENDS, _NEAR_ENDS = 0.5, 0.4  # share of changes near the ends of a row, where most is lost; how near that is

_Steps = dict[int, tuple[int, int, int, int]]  # slot → (time, kind of event, parts held, W due)
_Fills = list[list[tuple[int, int]]]  # by row, (index of a slot, number of W that run before it)


@dataclass(frozen=True)
class BareRows:
    """Rows without W, except for marked ones."""

    rows: tuple[tuple[int, ...], ...]
    spare: tuple[tuple[int, int], ...]  # by row, how many W run before and after the marked slots


def fills_pauses(problem: ScheduleProblem) -> bool:
    """Whether W can only fill pauses: no pair gains, and all W are alike."""
    return problem.has_equal_w and all(slot <= W for offered in problem.offered for slot in offered)


def fill_with_w(problem: ScheduleProblem, slots: Slots) -> Slots | None:
    """The slots with each W where its row would wait; None if a forward then has no room."""
    bare = _bare(problem, slots)
    timed = _time_rows(problem, _steps(problem), bare, [_initial_state(problem, bare)])
    return None if timed is None else _insert_fills(bare, timed.states[-1].fills)


def anneal_filled(
    problem: ScheduleProblem, slots: Slots, work: float, heat: tuple[float, float], seed: int, goal: int
) -> FoundSlots:
    """Walk as `anneal` does, on rows whose W fill pauses."""
    bare, steps = _bare(problem, slots), _steps(problem)
    timed = _time_rows(problem, steps, bare, [_initial_state(problem, bare)])
    if timed is None:
        return anneal(problem, slots, work, heat, seed, goal)
    draw, num_rows, value = random.Random(seed).random, problem.num_rows, timed.value()
    best, best_rows = (max(timed.ends), value), (bare, timed)
    temperature, cooling = heat[0] * problem.times[0][F] * num_rows, math.log(heat[1] / heat[0]) / work
    spent, size = 0.0, sum(map(len, bare.rows))
    works = _works(problem, steps, bare)
    while spent < work and best[0] > goal:
        spent += _DRAWN
        changed = _move_slot(problem.num_chunks, steps, bare, draw)
        if changed is None:
            continue
        spent += _CHANGED
        new, places = changed
        states = timed.states_before(places)
        allowed = -math.log(1 - draw()) * temperature * math.exp(cooling * spent)
        spent += _SLOT * (size - sum(states[-1].positions))
        limit = max(timed.ends) + int(allowed / num_rows)
        new_timed = _time_rows(problem, steps, new, states, [limit - work for work in works])
        if new_timed is None or new_timed.value() - value > allowed:
            continue
        bare, timed, value = new, new_timed, new_timed.value()
        if (max(timed.ends), value) < best:
            best, best_rows = (max(timed.ends), value), (bare, timed)
    return FoundSlots(*best, _insert_fills(best_rows[0], best_rows[1].states[-1].fills))


def _bare(problem: ScheduleProblem, slots: Slots) -> BareRows:
    """Rows without W. A B that takes as long as its two halves becomes an I."""
    rows, spares = [], []
    for times, row in zip(problem.times, slots, strict=True):
        bare_row, spare, part = [], [0, 0], 0
        for slot in row:
            if slot >= FIXED:
                part = 1
            elif slot == W:
                spare[part] += 1
                continue
            elif B <= slot < I and times[slot] == times[slot + I - B] + times[W]:
                spare[part] += 1
                slot += I - B
            bare_row.append(slot)
        rows.append(tuple(bare_row))
        spares.append((spare[0], spare[1]))
    return BareRows(tuple(rows), tuple(spares))


def _steps(problem: ScheduleProblem) -> list[_Steps]:
    """By row, the effects of its slots. A marked W makes no event and has the kind -1."""
    C, parts, w_parts, tables = problem.num_chunks, problem.activation_parts, problem.w_parts, []
    for times in problem.times:
        table: _Steps = {}
        for chunk in range(C):
            actions = ((F, chunk, parts, 0), (B, C + chunk, -parts, 0), (I, C + chunk, w_parts - parts, 1))
            for token, kind, holds, due in actions:
                table[token + chunk] = table[token + chunk + FIXED] = (times[token + chunk], kind, holds, due)
        table[W + FIXED] = (times[W], -1, -w_parts, -1)
        tables.append(table)
    return tables


@dataclass(slots=True)
class _FillState:
    """The progress of the rows: times of events, and by row the next slot, its time, and W that are due or spare."""

    events: list[int]
    needs: list[list[int]]  # by row and kind, the event that the next one waits for
    makes: list[list[int]]
    positions: list[int]
    clocks: list[int]
    due: list[int]
    live: list[int]
    idle: list[int]
    spare: list[list[int]]
    fills: _Fills

    def copy(self) -> _FillState:
        needs, makes, spare = ([row[:] for row in rows] for rows in (self.needs, self.makes, self.spare))
        flat = (self.events, self.positions, self.clocks, self.due, self.live, self.idle)
        events, positions, clocks, due, live, idle = (values[:] for values in flat)
        return _FillState(
            events, needs, makes, positions, clocks, due, live, idle, spare, [fill[:] for fill in self.fills]
        )


@dataclass(frozen=True)
class _TimedRows:
    ends: list[int]
    states: list[_FillState]  # saved states to continue from; the last one is the end

    def value(self) -> int:
        return len(self.ends) * max(self.ends) + sum(self.ends)

    def states_before(self, places: Sequence[int]) -> list[_FillState]:
        """The states that do not depend on the slots of the rows after these places."""
        return [
            state
            for state in self.states
            if all(position <= place for position, place in zip(state.positions, places, strict=True))
        ]


def _initial_state(problem: ScheduleProblem, bare: BareRows) -> _FillState:
    events, zeros = [-1] * problem.num_events, [0] * len(bare.rows)
    events[NOW : FIRST + problem.count] = [0] * (FIRST + problem.count - NOW)
    needs, makes, spare = ([list(row) for row in rows] for rows in (problem.needs, problem.makes, bare.spare))
    positions, clocks, due, live, idle = (zeros[:] for _ in range(5))
    return _FillState(events, needs, makes, positions, clocks, due, live, idle, spare, [[] for _ in zeros])


def _time_rows(
    problem: ScheduleProblem,
    steps: Sequence[_Steps],
    bare: BareRows,
    states: list[_FillState],
    pauses: Sequence[int] | None = None,
) -> _TimedRows | None:
    """Time the rows from the last state on.

    Returns None if rows wait for ever, if a forward has no room, or if a row pauses longer than its limit in `pauses`.
    """
    state = states[-1].copy()
    events, delays, w_parts, rows = state.events, problem.delays, problem.w_parts, range(len(bare.rows))
    turns = [*rows, *reversed(rows)]
    moved, states = True, states[:]
    while moved:
        moved = False
        for row in turns:
            slots, place = bare.rows[row], state.positions[row]
            count = len(slots)
            if place == count:
                continue
            table, need, make, cap = steps[row], state.needs[row], state.makes[row], problem.caps[row]
            time_w, spare, fill = problem.times[row][W], state.spare[row], state.fills[row]
            time, due, live = state.clocks[row], state.due[row], state.live[row]
            while place < count:
                slot = slots[place]
                length, kind, holds, more_due = table[slot]
                ready = events[need[kind]] if kind >= 0 else 0
                if ready < 0:
                    break
                limit, runs = spare[0] if spare[0] < due else due, 0  # `min` takes a tenth of all time
                if slot >= FIXED:
                    if not place or slots[place - 1] < FIXED:  # all W that run before the first marked slot
                        runs = limit = spare.pop(0)
                        spare[0] += runs
                elif ready > time and limit:
                    runs = min(limit, (ready - time) // time_w) if time_w else limit
                if live + holds > cap + runs * w_parts:
                    runs = -((cap - live - holds) // w_parts) if w_parts else due + 1
                if runs > limit or runs > due + min(more_due, 0):
                    return None
                if runs:
                    fill.append((place, runs))
                    time += runs * time_w
                    due -= runs
                    live -= runs * w_parts
                    spare[0] -= runs
                if ready > time:
                    state.idle[row] += ready - time
                    time = ready
                    if pauses is not None and state.idle[row] > pauses[row]:
                        return None
                time += length
                if kind >= 0:
                    events[make[kind]] = time + delays[row][kind]
                    make[kind] += 1
                    need[kind] += 1
                live += holds
                due += more_due
                place += 1
                moved = True
            state.positions[row], state.clocks[row], state.due[row], state.live[row] = place, time, due, live
        if sum(state.positions) - sum(states[-1].positions) >= _GAP * len(rows):
            states.append(state.copy())
    for row in rows:
        if state.positions[row] < len(bare.rows[row]):
            return None
        state.fills[row].append((state.positions[row], state.due[row]))
        state.clocks[row] += state.due[row] * problem.times[row][W]
    return _TimedRows(state.clocks, [*states, state])


def _works(problem: ScheduleProblem, steps: Sequence[_Steps], bare: BareRows) -> list[int]:
    """By row, the total time of its slots and W."""
    works = []
    for table, row, spare, times in zip(steps, bare.rows, bare.spare, problem.times, strict=True):
        works.append(sum(table[slot][0] for slot in row) + sum(spare) * times[W])
    return works


def _move_slot(
    num_chunks: int, steps: Sequence[_Steps], bare: BareRows, draw: Callable[[], float]
) -> tuple[BareRows, list[int]] | None:
    """The rows with a slot moved, and for each row the first place that differs.

    The slots of the same micro-batch in some neighbouring rows move equally far.
    """
    places = [len(row) for row in bare.rows]
    rows, row = list(bare.rows), int(draw() * len(bare.rows))
    place, end = draw(), draw()
    if end < _AT_ENDS:
        place = _NEAR_ENDS * place * place
        place = place if end < _AT_ENDS / 2 else 1 - place
    position = min(int(place * len(rows[row])), len(rows[row]) - 1)
    slot, far = rows[row][position], 1 + int(_FAR * draw() ** 3)
    if slot >= FIXED:
        return None
    number, far, step = rows[row][:position].count(slot), far if draw() < 0.5 else -far, 1 if draw() < 0.5 else -1
    while True:
        new = list(rows[row])
        target = position + far
        if not 0 <= target < len(new):
            return None
        del new[position]
        new.insert(target, slot)
        if (0 < target < len(new) - 1 and new[target - 1] >= FIXED <= new[target + 1]) or not _is_legal(
            num_chunks, steps[row], new
        ):
            return None
        rows[row], places[row] = tuple(new), min(position, target)
        row += step
        if not 0 <= row < len(rows) or draw() >= _GO_ON or rows[row].count(slot) <= number:
            return BareRows(tuple(rows), bare.spare), places
        position = -1
        for _ in range(number + 1):
            position = rows[row].index(slot, position + 1)


def _is_legal(num_chunks: int, steps: _Steps, row: Sequence[int]) -> bool:
    """Whether each backward comes after its forward."""
    done = [0] * (2 * num_chunks + 1)  # the last one for W
    for slot in row:
        kind = steps[slot][1]
        if kind >= num_chunks and done[kind] >= done[kind - num_chunks]:
            return False
        done[kind] += 1
    return True


def _insert_fills(bare: BareRows, fills: _Fills) -> Slots:
    """The rows with their W."""
    rows = []
    for row, fill in zip(bare.rows, fills, strict=True):
        slots: list[int] = []
        begin = 0
        for place, runs in fill:
            slots += (*row[begin:place], *(W,) * runs)
            begin = place
        rows.append(tuple(slots))
    return tuple(rows)
