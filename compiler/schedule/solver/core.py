"""The search of one problem: annealing from the best starts, and then from the best results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from compiler.schedule.solver.cycle import (
    COPIES,
    makespan_of,
    mark_periods,
    repeat_best_period,
    stretch_slots,
    unroll_period,
    waves,
)
from compiler.schedule.solver.filled import anneal_filled, fill_with_w, fills_pauses
from compiler.schedule.solver.moves import anneal
from compiler.schedule.solver.problem import ScheduleProblem, Slots, resize_problem
from compiler.schedule.solver.seeds import greedy_seeds, seeds
from compiler.schedule.solver.timing import FIXED

Report = Callable[[float], None]  # called with the share of the work that is done
Bound = Callable[[int], int]  # number of micro-batches per chunk -> lower bound of the makespan
_Heats = tuple[tuple[float, float], ...]  # temperatures at the start and at the end of a run, in F
# Work is counted by operations, in microseconds of one core of 2024, so that no clock decides the result.
_WORK_A_SLOT, _LEAST_WORK, _MOST_WORK = 60_000, 300_000, 15_000_000
_STEADY = 0.25  # share of the work for a better steady state, if that of the starts is not at the bound
_FIRST_ROUND = 0.65  # share of the remaining work
_RUN = 12_000  # work per slot of a run in the first round: shorter runs end high, longer ones are too few
_KEPT, _WORTH = 3, 1.02  # starts of the first round: at most this many, with at most this multiple of the best makespan
_HEATS: _Heats = ((0.2, 0.02), (0.1, 0.1), (0.1, 0.01), (0.05, 0.02))
_LAST_HEATS: _Heats = ((0.05, 0.01), (0.1, 0.02))
_FILLED_HEATS: _Heats = ((0.4, 0.04), (0.3, 0.02))  # of the first round if W fill pauses
_WAVES = 8  # how many of the waves are starts, the shortest first
_DOZENS, _FEW = 0.05, 3  # the least effort with all greedy starts, and their number below it
_LONG = 3  # a steady state is judged by a run of this many times the length


@dataclass(frozen=True)
class Core:
    """Slots that were found."""

    value: int  # the makespan; if a period is marked, the makespan of a much longer run
    origin: str  # "search", or the name of a start that no search improved
    problem: ScheduleProblem
    slots: Slots


def solve_core(
    problem: ScheduleProblem,
    effort: float,
    bound: Bound,
    periodic: bool,
    report: Report,
    initial: Sequence[Slots] = (),
    worth: int | None = None,
) -> Core | None:
    """The best slots found from all starts, or from `initial` ones; None if no start is legal.

    If the best start takes longer than `worth`, it is the result. With `periodic`, a period of the steady state is
    marked; the search leaves it unchanged, and it can be repeated. The search stops at the bound.
    """
    candidates = _cores_of_initial(problem, initial) if initial else _starts(problem, periodic, bound, effort)
    starts = sorted(candidates, key=lambda core: core.value)
    if not starts:
        return None
    if worth is not None and starts[0].value > worth:
        return starts[0]
    length = sum(map(len, starts[0].slots))
    work = effort * min(max(_WORK_A_SLOT * length, _LEAST_WORK), _MOST_WORK)
    if periodic and not initial and _is_slow(starts[0], bound):
        work *= 1 - _STEADY
        steady_starts = _steady(problem, work * _STEADY, bound, effort)
        starts = sorted([*starts, *steady_starts], key=lambda core: core.value)
    best = starts[0]
    goal = bound(best.problem.count)
    pool = list(dict.fromkeys(core.slots for core in starts if core.value <= _WORTH * best.value))[:_KEPT]
    runs, heats, walk = max(1, round(_FIRST_ROUND * work / (_RUN * length))), _HEATS, anneal
    if fills_pauses(best.problem):
        runs, heats, walk = len(_FILLED_HEATS), _FILLED_HEATS, anneal_filled
    rounds = ((runs, _FIRST_ROUND, heats, walk), (len(_LAST_HEATS), 1 - _FIRST_ROUND, _LAST_HEATS, anneal))
    seed, done = 0, 0.0
    for runs, share, heats, walk in rounds:
        cores: list[Core] = []
        for run in range(runs):
            seed, start, heat = seed + 1, pool[run % len(pool)], heats[run % len(heats)]
            slots = walk(best.problem, start, work * share / runs, heat, seed, goal).slots
            core = _core("search", best.problem, slots)
            assert core is not None
            cores.append(core)
            done += share / runs
            report(done)
            if core.value < best.value:
                best = core
        pool = [core.slots for core in sorted(cores, key=lambda core: core.value)]
    return best


def _starts(problem: ScheduleProblem, periodic: bool, bound: Bound, effort: float) -> Iterator[Core]:
    """Legal starts. Later kinds follow only if they can help: no earlier one is at the bound, or has its period."""
    cores: list[Core] = []
    makes = [_named_starts, _wave_starts, _greedy_starts]
    if problem.num_chunks > 2:  # too large for dozens of starts, and the named ones are good
        makes = [_named_starts]
    elif effort < _DOZENS and not periodic:  # all starts would take longer than the search
        makes = [_named_starts, _few_greedy_starts]
    for make in makes:
        if periodic and cores and (make == _greedy_starts or not all(_is_slow(core, bound) for core in cores)):
            return
        if not periodic and any(core.value <= bound(problem.count) for core in cores):
            return
        new_cores = list(make(problem, periodic, effort))
        new_cores += list(_fill_cores(new_cores))
        yield from new_cores
        cores += new_cores


def _fill_cores(cores: Sequence[Core]) -> Iterator[Core]:
    for core in cores:
        slots = fill_with_w(core.problem, core.slots) if fills_pauses(core.problem) else None
        new_core = slots and _core("search", core.problem, slots)
        if new_core and new_core.value < core.value:
            yield new_core


def _named_starts(problem: ScheduleProblem, periodic: bool, effort: float) -> Iterator[Core]:
    return _cores_of_slots(problem, periodic, seeds(problem))


def _greedy_starts(problem: ScheduleProblem, periodic: bool, effort: float) -> Iterator[Core]:
    return _cores_of_slots(problem, periodic, greedy_seeds(problem))


def _few_greedy_starts(problem: ScheduleProblem, periodic: bool, effort: float) -> Iterator[Core]:
    return _cores_of_slots(problem, periodic, islice(greedy_seeds(problem), _FEW))


def _cores_of_slots(problem: ScheduleProblem, periodic: bool, named: Iterable[tuple[str, Slots]]) -> Iterator[Core]:
    for name, slots in named:
        start = repeat_best_period(problem, slots) if periodic else (problem, slots)
        if start and (core := _core(name, *start)):
            yield core


def _wave_starts(problem: ScheduleProblem, periodic: bool, effort: float) -> Iterator[Core]:
    """Starts that repeat a period, with parts of it at the beginning and the end of the run."""
    larger = resize_problem(problem, problem.count + COPIES - 1) if periodic else problem
    for period in islice(waves(problem), _WAVES):
        slots = mark_periods(larger, period) if periodic else unroll_period(larger, period)
        if slots and (core := _core("wave", larger, slots)):
            yield core


def _cores_of_initial(problem: ScheduleProblem, initial: Sequence[Slots]) -> Iterator[Core]:
    return (core for slots in initial if (core := _core("search", problem, slots)))


def _core(origin: str, problem: ScheduleProblem, slots: Slots) -> Core | None:
    """The core of some slots, with its value; None if they are not legal."""
    periodic = any(slot >= FIXED for row in slots for slot in row)
    count = _LONG * problem.count if periodic else problem.count
    value = makespan_of(resize_problem(problem, count), stretch_slots(problem, slots, count) if periodic else slots)
    return None if value is None else Core(value, origin, problem, slots)


def _is_slow(core: Core, bound: Bound) -> bool:
    """Whether the steady state of a core is above the bound."""
    short, long = core.problem.count, _LONG * core.problem.count
    makespan = makespan_of(core.problem, core.slots)
    return makespan is not None and core.value - makespan > bound(long) - bound(short)


def _steady(problem: ScheduleProblem, work: float, bound: Bound, effort: float) -> Iterator[Core]:
    """Starts with a marked period, from the results of a search without one."""
    starts = sorted(_starts(problem, False, bound, effort), key=lambda core: core.value)[:_KEPT]
    for seed, start in enumerate(starts):
        slots = anneal(problem, start.slots, work / len(starts), _HEATS[0], seed, bound(problem.count)).slots
        periodic = repeat_best_period(problem, slots)
        if periodic and (core := _core("search", *periodic)):
            yield core
