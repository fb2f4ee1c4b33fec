"""Schedules shorter than a given one by constraint programming, for small problems: one, or a proof that there is none.

Needs OR-tools (the extra `solve`). It is asked for an end that is a little too early. The states of each rank (ADR 38)
then leave most actions a narrow window, which is what makes the search short. Of schedules that take equally long,
those are left out that differ from one that stays in nothing that counts:

- a lone B that takes no less than its I and W is these two, one behind the other;
- W that take equally long run in the order of their I: what they free is the same at all times.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any

from compiler.schedule.costs import Costs
from compiler.schedule.rank_states import SmallPipeline
from compiler.schedule.schedule import ScheduleError
from compiler.schedule.simulate import simulate
from compiler.schedule.solver.problem import (
    FIRST,
    MOST_CHUNKS,
    B,
    F,
    I,
    ScheduleProblem,
    Slots,
    W,
    alike,
    chunk_of,
    kind_of,
    schedule_of_slots,
    slot_of,
    tokens_of,
)
from compiler.schedule.solver.timing import line_of
from compiler.schedule.waits import Waits

MOST_TIME = 2**48  # sums of times are whole numbers of 64 bits
_STATES = 1_000_000  # steps of the states of ranks, looked at for windows
_Key = tuple[int, int]  # a token, a W with its chunk, and the micro-batch of the chunk
_Windows = dict[_Key, tuple[int, int]]  # of the F, and the B and I, of a row: the first and the last start


@dataclass(frozen=True)
class Exact:
    """The best slots found, None where none are shorter than was asked for, and their makespan. `proven`: there are no
    shorter ones. `left` of the work."""

    slots: Slots | None
    makespan: int
    proven: bool
    left: float


def exact(problem: ScheduleProblem, costs: Costs, makespan: int, work: float) -> Exact:
    """Slots of an unfolded problem that take less than a makespan, as short as `work` (deterministic seconds) finds.

    `costs`: those that the problem is made from. ValueError where OR-tools is missing.
    """
    if not has_or_tools():
        raise ValueError("a proof needs OR-tools: install dsc-trainer[solve]")
    from ortools.sat.python import cp_model

    best: Slots | None = None
    while work > 0:
        end = makespan - 1
        windows = _windows(problem, costs, end)
        if windows is None:
            return Exact(best, makespan, True, work)
        model = cp_model.CpModel()
        rows = [_ExactRow(model, problem, row, end, each) for row, each in enumerate(windows)]
        for row in rows:
            row.waits(rows)
        solver = solver_of(work)
        solver.parameters.linearization_level = 0  # relaxations say little here, and take half of the time
        status = solver.solve(model)
        work -= solver.deterministic_time
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Exact(best, makespan, status == cp_model.INFEASIBLE, work)
        slots = tuple(row.slots(solver) for row in rows)
        found = _judged(problem, costs, slots)
        if found is None or found > end:
            break
        best, makespan = slots, found
    return Exact(best, makespan, False, work)


def _judged(problem: ScheduleProblem, costs: Costs, slots: Slots) -> int | None:
    """What slots take, if they are legal in this form: W take turns, which the model does not ask of uneven stages."""
    if any(line_of(problem, row, each) is None for row, each in enumerate(slots)):
        return None
    try:
        return math.ceil(simulate(schedule_of_slots(problem, slots), costs).makespan / problem.unit)
    except ScheduleError:  # actions that take no time may wait for each other
        return None


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


def _windows(problem: ScheduleProblem, costs: Costs, end: int) -> list[_Windows] | None:
    """When actions can start if all is to end by `end`, by row; None if it cannot."""
    caps = tuple(Fraction(cap, problem.whole) for cap in problem.caps)
    waits = Waits(problem.placement, problem.num_ranks, problem.num_micro_batches, costs, caps)
    tick = waits.unit / problem.unit
    last = math.floor(end / tick)
    found = SmallPipeline(waits, _STATES).windows(last)
    if found is None:
        return None
    heads, rests = found
    rows: list[_Windows] = [{} for _ in range(problem.num_rows)]
    for row, homes in enumerate(problem.homes):
        for chunk, (stage, direction) in enumerate(homes):
            for token, kind in ((F, "F"), (B, "B")):
                for k in range(problem.counts[row][chunk]):
                    head, rest = (times[kind, (direction, stage)][k] for times in (heads, rests))
                    if head + rest > last:
                        return None
                    rows[row][token + chunk, k] = math.ceil(head * tick), math.floor((last - rest) * tick)
    return rows


class _ExactRow:
    """The variables of a row: when each action starts and ends, whether a backward is split, and what overlaps."""

    def __init__(self, model: Any, problem: ScheduleProblem, row: int, end: int, windows: _Windows) -> None:
        self.model, self.problem, self.row, self.horizon = model, problem, row, end
        self.times, self.windows = problem.times[row], windows
        self.begin: dict[_Key, Any] = {}  # an I is at the place of its B
        self.end: dict[_Key, Any] = {}
        self.taken: dict[tuple[_Key, ...], Any] = {}  # a lone action, or a pair: whether the row runs it
        self.split: dict[_Key, Any] = {}  # by W, whether it is there
        chunks = [(chunk, k) for chunk, count in enumerate(problem.counts[row]) for k in range(count)]
        for chunk, k in chunks:
            weights, back = (W + chunk, k), B + chunk
            windows[weights] = windows[back, k][0], end
            self.split[weights] = model.new_bool_var("")
            for token in (F + chunk, back, W + chunk):
                self.begin[token, k] = model.new_int_var(*windows[token, k], "")
                self.end[token, k] = self._time()
        keys = [(token + chunk, k) for chunk, k in chunks for token in (F, B, I, W)]
        for one in [(key,) for key in keys] + [two for two in combinations(keys, 2) if self._overlap(*two)]:
            self.taken[one] = model.new_bool_var("")
        self._durations(keys)
        self._one_at_a_time()
        self._orders(chunks)
        self._weights_in_turn()

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def _overlap(self, one: _Key, other: _Key) -> bool:
        """Whether two actions can be a pair."""
        slot = slot_of(min(token, W) for token, _ in (one, other))
        related = one[1] == other[1] and chunk_of(one[0]) == chunk_of(other[0])
        (first, last), (other_first, other_last) = (self.windows[_place(key)] for key in (one, other))
        meet = first <= other_last and other_first <= last
        return slot in self.problem.offered[self.row] and meet and not related

    def _durations(self, keys: Sequence[_Key]) -> None:
        """Each action alone or in one pair; a split backward is an I and a W, else it is a B."""
        model, times = self.model, self.times
        length: dict[_Key, list[Any]] = {key: [] for key in self.begin}
        uses: dict[_Key, list[Any]] = {key: [] for key in keys}
        intervals = []
        for one, taken in self.taken.items():
            time = times[slot_of(token for token, _ in one)]
            begin = self.begin[_place(one[0])]
            intervals.append(model.new_optional_fixed_size_interval_var(begin, time, taken, ""))
            for key in one:
                uses[key].append(taken)
                length[_place(key)].append(time * taken)
                if key != one[0]:
                    model.add(self.begin[_place(key)] == begin).only_enforce_if(taken)
        model.add_no_overlap(intervals)
        for (token, k), taken in uses.items():
            if token < B:
                model.add_exactly_one(taken)
            else:
                split = self.split[W + chunk_of(token), k]
                model.add_exactly_one([*taken, split if token < I else split.negated()])
                if B <= token < I and times[token] >= times[token + MOST_CHUNKS] + times[W + chunk_of(token)]:
                    model.add(self.taken[((token, k),)] == 0)
        for key, lengths in length.items():
            model.add(self.end[key] == self.begin[key] + sum(lengths))

    def _one_at_a_time(self) -> None:
        """Actions of kinds of which no two are a pair never overlap: said of all of them, whatever else is a pair."""
        pairs = {frozenset(map(kind_of, tokens_of(slot))) for slot in self.problem.offered[self.row] if slot > W}
        kinds: dict[str, list[Any]] = defaultdict(list)
        for key, begin in self.begin.items():
            size = self._time()
            if key[0] < W:
                interval = self.model.new_interval_var(begin, size, self.end[key], "")
            else:
                interval = self.model.new_optional_interval_var(begin, size, self.end[key], self.split[key], "")
            kinds[kind_of(key[0])].append(interval)
        for some in ("FBIW", "FW", "BIW"):
            if not any(pair <= set(some) for pair in pairs):
                self.model.add_no_overlap([interval for kind in some for interval in kinds[kind]])

    def _orders(self, chunks: Sequence[tuple[int, int]]) -> None:
        """A backward after its forward, a W after its I, micro-batches in order, and no more held than the cap."""
        model, held, demands = self.model, [], []
        kept = self.problem.kept
        for chunk, k in chunks:
            forward, backward, weights = (F + chunk, k), (B + chunk, k), (W + chunk, k)
            model.add(self.begin[backward] >= self.end[forward])
            model.add(self.begin[weights] >= self.end[backward])
            model.add(self.begin[weights] == self.end[backward]).only_enforce_if(self.split[weights].negated())
            for end, parts in ((self.end[weights], kept), (self.end[backward], self.problem.whole - kept)):
                if parts:
                    held.append(model.new_interval_var(self.begin[forward], self._time(), end, ""))
                    demands.append(parts)
            for token, _ in (forward, backward):
                if k:
                    model.add(self.begin[token, k] >= self.begin[token, k - 1])
        model.add_cumulative(held, demands, self.problem.caps[self.row])

    def _weights_in_turn(self) -> None:
        """W of stages of equal weights, in the order of their I."""
        model, begin, times = self.model, self.begin, self.times
        for one, other in combinations(self.split, 2):
            first, second = ((B + chunk_of(token), k) for token, k in (one, other))
            a, b, count = chunk_of(one[0]), chunk_of(other[0]), len(self.problem.counts[self.row])
            if all(alike(times, kind + a, kind + b, count) for kind in (F, B, I, W)):
                in_order = model.new_bool_var("")
                both = self.split[one], self.split[other]
                model.add(begin[first] <= begin[second]).only_enforce_if(in_order)
                model.add(begin[second] <= begin[first]).only_enforce_if(in_order.negated())
                model.add(begin[one] <= begin[other]).only_enforce_if(in_order, *both)
                model.add(begin[other] <= begin[one]).only_enforce_if(in_order.negated(), *both)

    def waits(self, rows: Sequence[_ExactRow]) -> None:
        """Make actions wait for what comes from other rows."""
        problem, count, C = self.problem, self.problem.count, self.problem.num_chunks
        for (token, k), begin in self.begin.items():
            kind = chunk_of(token) + (C if token >= B else 0)
            need = problem.needs[self.row][kind] - FIRST - count if token < I else -1
            if need >= 0:
                row, made = divmod(need // count, 2 * C)
                end = rows[row].end[made if made < C else B + made - C, k]
                self.model.add(begin >= end + (0 if row == self.row else problem.delays[row][made]))

    def slots(self, solver: Any) -> tuple[int, ...]:
        """What was found, as slots in the order of their starts."""
        found = []
        for one, taken in self.taken.items():
            if solver.value(taken):
                tokens = sorted(min(token, W) for token, _ in one)
                found.append((solver.value(self.begin[_place(one[0])]), tokens))
        return tuple(slot_of(tokens) for _, tokens in sorted(found))


def _place(key: _Key) -> _Key:
    """Where the times of an action are: an I takes the place of its B."""
    return (key[0] - MOST_CHUNKS, key[1]) if I <= key[0] < W else key
