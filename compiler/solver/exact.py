"""The least makespan of a problem by constraint programming, for small ones: a proof where `Solver` has only a bound.

Needs OR-tools (the extra `solve`). What is proven holds of all orders that the problem's rows have: of folded ones,
those in which mirrored ranks run the same list.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any

from compiler.schedules.costs import Costs
from compiler.schedules.schedule import Schedule
from compiler.schedules.simulate import simulate
from compiler.solver.line import line_of
from compiler.solver.periods import makespan_of
from compiler.solver.problem import FIRST, Problem, make_problem, schedule_of_slots, slots_of_schedule
from compiler.solver.timing import starts_of, timing_of
from compiler.solver.tokens import MOST_CHUNKS, B, F, I, Slots, W, chunk_of, pair, slot_of, tokens_of
from compiler.stage_placement import BIDIRECTIONAL

MOST_TIME = 2**48  # sums of times are whole numbers of 64 bits
_Key = tuple[int, int]  # a token, a W with its chunk, and the micro-batch of the chunk


@dataclass(frozen=True)
class Exact:
    """The best slots found and their makespan; none is below `bound`, so where it is equal they are the best."""

    slots: Slots
    makespan: int
    bound: int


def prove(schedule: Schedule, costs: Costs, cap: Fraction | int, work: float) -> tuple[Schedule, Fraction, Fraction]:
    """Improve a schedule of `auto`: a schedule at least as short, its makespan, and a lower bound for its form.

    Costs and cap are those of the schedule's own stages. `work` is in deterministic seconds of one core: P = 4 and
    N = 8 take one, P = 8 and N = 20 are too large.
    ValueError where OR-tools is missing.
    """
    P, N = schedule.num_ranks, schedule.num_micro_batches
    mirrored = schedule.stage_placement == BIDIRECTIONAL and costs.is_mirrored(P) and N % 2 == 0
    problem = make_problem(schedule.stage_placement, P, N, costs, cap, mirrored)
    found = exact(problem, slots_of_schedule(problem, schedule), work)
    best = schedule_of_slots(problem, found.slots)
    return best, simulate(best, costs).makespan, found.bound * problem.unit


def exact(problem: Problem, start: Slots, work: float) -> Exact:
    """Go on from legal slots for `work` (deterministic seconds of one core); ValueError where OR-tools is missing."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ValueError("a proof needs OR-tools: install dsc-trainer[solve]") from None
    lines = [line for row, each in enumerate(start) if (line := line_of(problem, row, each))]
    timing = timing_of(problem, lines)
    assert timing is not None, "the start is not legal"
    model = cp_model.CpModel()
    end = model.new_int_var(0, timing.makespan, "end")
    rows = [_Row(model, problem, row, timing.makespan) for row in range(problem.num_rows)]
    for row, line, starts in zip(rows, lines, starts_of(problem, timing, lines), strict=True):
        row.waits(rows)
        row.hint(line.slots, starts)
        for time in row.end.values():
            model.add(end >= time)
    model.minimize(end)
    solver = solver_of(work)
    status = solver.solve(model)
    bound = math.ceil(solver.best_objective_bound - 1e-6)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        slots = tuple(row.slots(solver) for row in rows)
        makespan = makespan_of(problem, slots)  # W of uneven stages take turns here as the model need not let them
        if makespan is not None and makespan < timing.makespan:
            return Exact(slots, makespan, bound)
    return Exact(start, timing.makespan, bound)


def solver_of(work: float) -> Any:
    """A CP-SAT solver that gives the same answer every time, of so many deterministic seconds of one core."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    return solver


class _Row:
    """The variables of a row: when each action starts and ends, whether a backward is split, and what overlaps."""

    def __init__(self, model: Any, problem: Problem, row: int, horizon: int) -> None:
        self.model, self.problem, self.row, self.horizon = model, problem, row, horizon
        self.counts = problem.counts[row]
        self.begin: dict[_Key, Any] = {}  # an I is at the place of its B
        self.end: dict[_Key, Any] = {}
        self.taken: dict[tuple[_Key, ...], Any] = {}  # a lone action, or a pair: whether the row runs it
        chunks = [(chunk, k) for chunk, count in enumerate(self.counts) for k in range(count)]
        for chunk, k in chunks:
            for token in (F + chunk, B + chunk, W + chunk):
                self.begin[token, k] = self._time()
                self.end[token, k] = self._time()
        keys = [(token + chunk, k) for chunk, k in chunks for token in (F, B, I, W)]
        for one in [(key,) for key in keys] + [two for two in combinations(keys, 2) if self._overlap(*two)]:
            self.taken[one] = model.new_bool_var("")
        self._durations(keys)
        self._orders(chunks)

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def _overlap(self, one: _Key, other: _Key) -> bool:
        """Whether two actions can be a pair."""
        slot = slot_of(min(token, W) for token, _ in (one, other))
        related = one[1] == other[1] and chunk_of(one[0]) == chunk_of(other[0])
        return slot in self.problem.offered[self.row] and not related

    def _durations(self, keys: Sequence[_Key]) -> None:
        """Each action alone or in one pair; a split backward is an I and a W, else it is a B."""
        model, times = self.model, self.problem.times[self.row]
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
                model.add(sum(taken) == 1)
            elif token < I:
                split = model.new_bool_var("")
                model.add(sum(taken) == 1 - split)
                model.add(sum(uses[token + MOST_CHUNKS, k]) == split)
                model.add(sum(uses[token + 2 * MOST_CHUNKS, k]) == split)
        for key, lengths in length.items():
            model.add(self.end[key] == self.begin[key] + sum(lengths))

    def _orders(self, chunks: Sequence[tuple[int, int]]) -> None:
        """A backward after its forward, a W after its I, micro-batches in order, and no more held than the cap."""
        model, held, demands = self.model, [], []
        kept = self.problem.kept
        for chunk, k in chunks:
            forward, backward, weights = (F + chunk, k), (B + chunk, k), (W + chunk, k)
            model.add(self.begin[backward] >= self.end[forward])
            model.add(self.begin[weights] >= self.end[backward])  # of no length where there is none
            for end, parts in ((self.end[weights], kept), (self.end[backward], self.problem.whole - kept)):
                if parts:
                    held.append(model.new_interval_var(self.begin[forward], self._time(), end, ""))
                    demands.append(parts)
            for token, _ in (forward, backward):
                if k:
                    model.add(self.begin[token, k] >= self.begin[token, k - 1])
        model.add_cumulative(held, demands, self.problem.caps[self.row])

    def waits(self, rows: Sequence[_Row]) -> None:
        """Make actions wait for what comes from other rows."""
        problem, count, C = self.problem, self.problem.count, self.problem.num_chunks
        for (token, k), begin in self.begin.items():
            kind = chunk_of(token) + (C if token >= B else 0)
            need = problem.needs[self.row][kind] - FIRST - count if token < I else -1
            if need >= 0:
                row, made = divmod(need // count, 2 * C)
                stays = row == self.row and not problem.folded  # there, the middle is between two ranks
                end = rows[row].end[made if made < C else B + made - C, k]
                self.model.add(begin >= end + (0 if stays else problem.delays[row][made]))

    def hint(self, slots: Sequence[int], starts: Sequence[int]) -> None:
        """Give the solver these slots to begin with."""
        chosen = set()
        for keys, start in zip(_keys(slots), starts, strict=True):
            chosen.add(frozenset(keys))
            for key in keys:
                self.model.add_hint(self.begin[_place(key)], start)
        for one, taken in self.taken.items():
            self.model.add_hint(taken, frozenset(one) in chosen)

    def slots(self, solver: Any) -> tuple[int, ...]:
        """What was found, as slots in the order of their starts."""
        found = []
        for one, taken in self.taken.items():
            if solver.value(taken):
                tokens = sorted(min(token, W) for token, _ in one)
                found.append((solver.value(self.begin[_place(one[0])]), tokens))
        return tuple(pair(*tokens) if len(tokens) == 2 else tokens[0] for _, tokens in sorted(found))


def _place(key: _Key) -> _Key:
    """Where the times of an action are: an I takes the place of its B."""
    return (key[0] - MOST_CHUNKS, key[1]) if I <= key[0] < W else key


def _keys(slots: Sequence[int]) -> Iterator[tuple[_Key, ...]]:
    """The actions of slots: the k-th of a kind is of the k-th micro-batch, W takes the oldest I."""
    done = [0] * W
    split: deque[_Key] = deque()
    for slot in slots:
        keys = []
        for token in tokens_of(slot):
            if token == W:
                oldest, k = split.popleft()
                keys.append((oldest + MOST_CHUNKS, k))
            else:
                place = token if token < I else token - MOST_CHUNKS
                keys.append((token, done[place]))
                done[place] += 1
        split.extend(key for key in keys if I <= key[0] < W)
        yield tuple(keys)
