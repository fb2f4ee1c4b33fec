"""The shortest period of some micro-batches by constraint programming: a proof where it is small, else an improvement.

Needs OR-tools (the extra `solve`). It is asked whether there is a period of a given time, again and again: what
waits over a number of periods then waits for a time that is known, which makes the search short. That the k-th event of
a row waits for the k-th of another is said by how many more the other has done when its period begins. Of periods of
the same time, those are left out that differ in nothing that counts:

- those that begin at another time: the first forward of the first row starts at 0;
- a lone B that takes no less than its I and W is these two, one behind the other;
- W run in the order of their I.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any

from compiler.schedule.solver.cycle import Period, aligned, cycle_time, source_of
from compiler.schedule.solver.problem import B, F, I, ScheduleProblem, W, chunk_of, slot_of, tokens_of

MOST_TIME = 2**48  # sums of times are whole numbers of 64 bits
_NEAR = 64  # where less than such a part of the time is open, a period that is one unit shorter is asked for
_Key = tuple[int, int]  # a token, a W with its chunk, and its number in the period


def has_or_tools() -> bool:
    """Whether OR-tools is there."""
    try:
        from ortools.sat.python import cp_model  # noqa: F401
    except ImportError:
        return False
    return True


def solver_of(work: float) -> Any:
    """A CP-SAT solver that gives the same answer every time, of so many deterministic seconds of one core."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    return solver


@dataclass(frozen=True)
class ShortestPeriod:
    """A period, and a time than which none of as many micro-batches is shorter."""

    period: Period | None
    bound: int


def shortest(
    problem: ScheduleProblem,
    size: int,
    work: float,
    start: Period | None = None,
    below: Fraction | None = None,
    least: int = 1,
) -> ShortestPeriod:
    """A period of `size` micro-batches of each chunk, found in so many deterministic seconds; no longer than `start`,
    which is of as many, and than `below`, which is a time.

    None where none is found and there is no start. No period of so many is shorter than `least`. Where a W takes a time
    that depends on its chunk, no backward is split.
    """
    lone = max(
        sum(times[slot + chunk] for slot in (F, B) for chunk in range(problem.num_chunks)) for times in problem.times
    )
    ways = problem.num_rows * 2 * (lone + problem.num_chunks * max(problem.delay))
    best, begun = start, cycle_time(problem, start) if start else below
    end = ways * size + 1 if begun is None else math.ceil(begun)
    if end * size * (2 * problem.num_rows * problem.num_chunks + 2) > MOST_TIME:  # the unit is too fine
        return ShortestPeriod(best, 0)
    asked = end - 1 if best is None else _next(least, end)
    while work > 0 and least < end:
        period, none, spent = _asked(problem, size, asked, work if asked == end - 1 else work / 2, best)
        work -= spent
        if period is not None:
            time = cycle_time(problem, period)
            assert time is not None and time <= asked, "a period takes longer than it was asked to"
            best, end = period, math.ceil(time)
            asked = _next(least, end)
        elif none:
            least = asked + 1
            asked = _next(least, end)
        elif asked == end - 1:
            break
        else:
            asked = (asked + end) // 2
    return ShortestPeriod(best, least)


def _next(least: int, end: int) -> int:
    """What to ask for next, between what nothing shows to be impossible and the best."""
    return end - 1 if (end - least) * _NEAR <= end else (least + end) // 2


def _asked(
    problem: ScheduleProblem, size: int, time: int, work: float, hint: Period | None
) -> tuple[Period | None, bool, float]:
    """A period of at most a time, whether it is shown that there is none, and the work spent."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    rows = [_PeriodRow(model, problem, row, size, time) for row in range(problem.num_rows)]
    for row in rows:
        row.waits(rows)
    model.add(rows[0].begin[F, 0] == 0)
    model.add(rows[0].done[0] == rows[0].most_done)
    if hint:
        moved, begins, _ = aligned(problem, hint)
        for row in rows:
            row.hint(moved, begins[row.row])
    solver = solver_of(work)
    solver.parameters.linearization_level = 0  # relaxations find no period sooner
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, status == cp_model.INFEASIBLE, solver.deterministic_time
    done = tuple(tuple(solver.value(each) for each in row.done) for row in rows)
    slots = tuple(row.slots(solver) for row in rows)
    due = tuple(sum(solver.value(each) for each in row.later.values()) for row in rows)
    return Period(size, slots, done, due), False, solver.deterministic_time


class _PeriodRow:
    """The variables of a row: when actions start in its period, what overlaps, and what is done when it begins."""

    def __init__(self, model: Any, problem: ScheduleProblem, row: int, size: int, time: int) -> None:
        self.model, self.problem, self.row, self.size, self.time = model, problem, row, size, time
        C = problem.num_chunks
        self.chunks = range(C)
        self.most_done = size * (2 * problem.num_rows * C + 2)
        self.done = [model.new_int_var(0, self.most_done, "") for _ in range(2 * C)]
        self.splits = problem.one_w
        first = [F + chunk for chunk in self.chunks] + [B + chunk for chunk in self.chunks]
        keys = [(token, k) for token in first for k in range(size)]
        self.begin = {key: self._time() for key in keys}  # an I is at the place of its B
        self.end = {key: self._time(2) for key in keys}
        self.begin_w = {(W + c, k): self._time() for c in self.chunks for k in range(size) if self.splits}
        self.end_w = {key: self._time(2) for key in self.begin_w}
        self.split = {key: model.new_bool_var("") for key in self.begin_w}
        self.later = {key: model.new_bool_var("") for key in self.begin_w}  # a W in the period after its I
        all_keys = keys + [(I + c, k) for c in self.chunks for k in range(size) if self.splits] + list(self.begin_w)
        self.taken: dict[tuple[_Key, ...], Any] = {}
        for one in [(key,) for key in all_keys] + [two for two in combinations(all_keys, 2) if self._overlap(*two)]:
            self.taken[one] = model.new_bool_var("")
        self._durations(all_keys)
        self._orders()
        self._weights_in_turn()
        self._held()

    def _time(self, times: int = 1) -> Any:
        return self.model.new_int_var(0, times * self.time, "")

    def _overlap(self, one: _Key, other: _Key) -> bool:
        return slot_of(min(token, W) for token, _ in (one, other)) in self.problem.offered[self.row]

    def _at(self, key: _Key) -> tuple[Any, Any]:
        """Start and end of an action."""
        if key[0] >= W:
            return self.begin_w[key], self.end_w[key]
        place = _place(key)
        return self.begin[place], self.end[place]

    def _durations(self, keys: list[_Key]) -> None:
        """Each action alone or in one pair, no two at once, and all of them within one period."""
        model, times = self.model, self.problem.times[self.row]
        length: dict[_Key, list[Any]] = {key: [] for key in (*self.begin, *self.begin_w)}
        uses: dict[_Key, list[Any]] = {key: [] for key in keys}
        intervals, work = [], []
        for one, taken in self.taken.items():
            time = times[slot_of(token for token, _ in one)]
            begin = self._at(one[0])[0]
            intervals.append(model.new_optional_fixed_size_interval_var(begin, time, taken, ""))
            work.append(time * taken)
            for key in one:
                uses[key].append(taken)
                length[_place(key)].append(time * taken)
                if key != one[0]:
                    model.add(self._at(key)[0] == begin).only_enforce_if(taken)
        model.add_no_overlap(intervals)
        model.add(sum(work) <= self.time)
        for key, taken in uses.items():
            token, k = key
            if token < B or not self.splits:
                model.add_exactly_one(taken)
            else:
                split = self.split[W + chunk_of(token), k]
                model.add(sum(taken) == (1 - split if token < I else split))
                if token < I and times[token] >= times[token - B + I] + times[token - B + W]:
                    model.add(self.taken[(key,)] == 0)
        opened = self._time()
        for key, lengths in length.items():
            begin, end = self._at(key)
            model.add(end == begin + sum(lengths))
            model.add(begin >= opened)
            model.add(begin < self.time)
            model.add(end <= opened + self.time)

    def _orders(self) -> None:
        """Actions of a kind one behind the other, and W behind I."""
        for (token, k), begin in self.begin.items():
            if k:
                self.model.add(begin >= self.begin[token, k - 1])
        for (token, k), begin in self.begin_w.items():
            later, end = self.later[token, k], self.end[B + chunk_of(token), k]
            self.model.add(begin >= end).only_enforce_if(later.Not())
            self.model.add(begin + self.time >= end).only_enforce_if(later)
            self.model.add_implication(later, self.split[token, k])

    def _weights_in_turn(self) -> None:
        """W in the order of their I, which is that of the start of these, and from the last on to the next period."""
        model, time = self.model, self.time
        at = {key: begin + time * self.later[key] for key, begin in self.begin_w.items()}
        for one, other in combinations(at, 2):
            first, second = (self.begin[token - W + B, k] for token, k in (one, other))
            both: tuple[Any, ...] = self.split[one], self.split[other]
            if one[0] != other[0]:
                in_order = model.new_bool_var("")
                model.add(first <= second).only_enforce_if(in_order)
                model.add(second <= first).only_enforce_if(in_order.negated())
                model.add(at[other] <= at[one]).only_enforce_if(in_order.negated(), *both)
                model.add(at[one] <= at[other] + time).only_enforce_if(in_order.negated(), *both)
                both = (in_order, *both)
            model.add(at[one] <= at[other]).only_enforce_if(*both)
            model.add(at[other] <= at[one] + time).only_enforce_if(*both)

    def _held(self) -> None:
        """No more activations than the cap when a forward begins."""
        model, C, whole, kept = self.model, len(self.chunks), self.problem.whole, self.problem.kept
        forwards = [(F + chunk, k) for chunk in self.chunks for k in range(self.size)]
        begun = {}
        for one, other in combinations(forwards, 2):
            if one[0] != other[0]:  # both where they begin at once
                begun[one, other], begun[other, one] = model.new_bool_var(""), model.new_bool_var("")
                model.add_at_least_one(begun[one, other], begun[other, one])
                model.add(self.begin[one] >= self.end[other]).only_enforce_if(begun[one, other].Not())
                model.add(self.begin[other] >= self.end[one]).only_enforce_if(begun[other, one].Not())
        for forward in forwards:
            held: Any = whole * (sum(self.done[:C]) - sum(self.done[C:]) + 1) + kept * sum(self.later.values())
            held += whole * sum(
                begun[other, forward] if other[0] != forward[0] else int(other[1] < forward[1])
                for other in forwards
                if other != forward
            )
            for chunk in self.chunks:
                for k in range(self.size):
                    split = self.split.get((W + chunk, k))
                    held -= whole * self._ended(self.end[B + chunk, k], forward, split)
                    if kept < whole and split is not None:
                        held -= (whole - kept) * self._ended(self.end[B + chunk, k], forward, split.Not())
            for key, end in self.end_w.items():
                held -= kept * self._ended(end, forward, self.split[key].Not())
            model.add(held <= self.problem.caps[self.row])

    def _ended(self, end: Any, forward: _Key, never: Any) -> Any:
        """Whether something has been freed before a forward begins."""
        ended = self.model.new_bool_var("")
        self.model.add(end <= self.begin[forward]).only_enforce_if(ended)
        if never is not None:
            self.model.add_implication(never, ended.Not())
        return ended

    def waits(self, rows: list[_PeriodRow]) -> None:
        """Make events wait for those of other rows, and the last stage's backwards for its forwards."""
        C = len(self.chunks)
        for kind in range(2 * C):
            source = source_of(self.problem, self.row, kind)
            if source:
                self._wait(kind, rows[source[0]], source[1], self.problem.delays[source[0]][source[1]])
            elif kind >= C:
                self._wait(kind, self, kind - C, 0)

    def _wait(self, kind: int, other: _PeriodRow, source: int, latency: int) -> None:
        model, ahead = self.model, []
        tokens = [chunk + token for token in (F, B) for chunk in self.chunks]
        for more in range(2 * self.size + 1):
            taken = model.new_bool_var("")
            ahead.append(taken)
            for k in range(self.size):
                periods, number = divmod(k - more, self.size)
                ready = other.end[tokens[source], number] + periods * self.time + latency
                model.add(self.begin[tokens[kind], k] >= ready).only_enforce_if(taken)
        model.add_exactly_one(ahead)
        model.add(other.done[source] - self.done[kind] == sum(more * taken for more, taken in enumerate(ahead)))

    def hint(self, start: Period, begins: list[int]) -> None:
        """Give the solver a period to begin with, and when its slots begin."""
        model, oldest = self.model, _split(start.rows[self.row])
        if not self.later.keys() >= {*oldest}:  # W of unlike sizes are split here, and not in the model
            return
        for each, value in zip(self.done, start.done[self.row], strict=True):
            model.add_hint(each, value)
        chosen = set()
        made: Counter[int] = Counter()
        due = -start.due[self.row]
        for slot, begin in zip(start.rows[self.row], begins, strict=True):
            keys = []
            for token in tokens_of(slot):
                if token == W:  # due ones are of the period before
                    key = oldest[due % len(oldest)]
                    model.add_hint(self.later[key], due < 0)
                    due += 1
                else:
                    place = _place((token, 0))[0]
                    key = (token, made[place])
                    made[place] += 1
                keys.append(key)
                model.add_hint(self._at(key)[0], begin)
            chosen.add(frozenset(keys))
        for key, each in self.split.items():
            model.add_hint(each, key in oldest)
        for one, taken in self.taken.items():
            model.add_hint(taken, frozenset(one) in chosen)

    def slots(self, solver: Any) -> tuple[int, ...]:
        """What was found, as slots in the order of their starts."""
        found = []
        for one, taken in self.taken.items():
            if solver.value(taken):
                found.append((solver.value(self._at(one[0])[0]), slot_of(min(token, W) for token, _ in one)))
        return tuple(slot for _, slot in sorted(found))


def _place(key: _Key) -> _Key:
    return (key[0] - I + B, key[1]) if I <= key[0] < W else key


def _split(slots: tuple[int, ...]) -> list[_Key]:
    """The W of a row's I, in the order of these."""
    made: Counter[int] = Counter()
    found = []
    for slot in slots:
        for token in tokens_of(slot):
            if B <= token < W:
                if token >= I:
                    found.append((W + chunk_of(token), made[chunk_of(token)]))
                made[chunk_of(token)] += 1
    return found
