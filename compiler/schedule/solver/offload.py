"""`auto` where activations can go to the host: schedules that hold more than the cap, with copies that make them fit.

The search knows no copies. It is asked without a cap, under the given cap and under larger ones, and copies are placed
in what it finds (copies.py). What it finds under the given cap has none, so the result is never longer than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import Costs
from compiler.schedule.solver.asked import Asked, Cap, checked
from compiler.schedule.solver.copies import with_copies
from compiler.schedule.solver.solve import Solution, Solver, default_cap

_SHARE = 0.3  # of the effort, of each search that is not under the given cap
_LARGER = (Fraction(2), Fraction(3, 2), Fraction(5, 4))  # times the given cap
Search = Callable[[Solver], Solution]


def solved_with_copies(solver: Solver, num_ranks: int, num_stages: int, search: Search) -> Solution:
    """The best of what `search` finds with a solver, and of what copies make of what it finds under other caps.

    `num_stages`: the costs and the cap of the solver are those of one of so many. Without a cap nothing need go to the
    host. ValueError as of the search.
    """
    device = replace(solver, costs=solver.costs.on_device())
    if solver.cap is None:
        return search(device)
    found = _Found(checked(Asked(num_ranks, 1, solver.costs, num_stages, solver.cap)), solver.cap)
    found.add(search(replace(device, cap=None, effort=_SHARE * solver.effort)))
    if found.best is None or found.bound(device.costs) <= found.key()[0]:
        found.add(search(device))
    for cap in _larger(solver.cap, num_ranks, num_stages):
        if found.key()[0] > found.bound(solver.costs):
            found.add(search(replace(device, cap=cap, effort=_SHARE * solver.effort)))
    return found.solution()


def _larger(cap: Cap, num_ranks: int, num_stages: int) -> Iterator[Cap]:
    """Caps under which fewer activations must go to the host than without any."""
    of_rank = cap if isinstance(cap, tuple) else (cap,)
    for by in _LARGER:
        if max(of_rank) * by < Fraction(default_cap(num_ranks) * num_stages, num_ranks):
            yield tuple(each * by for each in of_rank) if isinstance(cap, tuple) else cap * by


@dataclass
class _Found:
    """What searches have found so far; `asked` has their micro-batches."""

    asked: Asked
    cap: Cap
    best: Solution | None = None
    copies: int = 0  # of the best
    searched: dict[StagePlacement, None] = field(default_factory=dict)

    def key(self) -> tuple[Fraction, int]:
        """The least is the best: the makespan, then how much is copied."""
        assert self.best is not None  # under the given cap nothing need go
        return self.best.makespan, self.copies

    def bound(self, costs: Costs) -> Fraction:
        """The least that is possible under the cap with such costs, on what was searched."""
        return min(replace(self.asked, costs=costs).bound(each, self.cap) for each in self.searched)

    def add(self, solution: Solution) -> None:
        """Take a schedule with its copies, if it is better."""
        schedule, on = solution.schedule, solution.schedule.stage_placement
        self.asked = replace(self.asked, num_micro_batches=schedule.num_micro_batches)
        self.searched |= dict.fromkeys(solution.searched)
        costs, caps = self.asked.costs_on(on), self.asked.caps_on(on, self.cap)
        placed = with_copies(schedule, costs, caps)
        if placed is None:
            return
        makespan, copies = placed[1].makespan, sum(map(len, placed[1].copies))
        if self.best is None or (makespan, copies) < self.key():
            self.copies = copies
            self.best = replace(solution, schedule=placed[0], costs=costs, cap=max(caps), makespan=makespan)

    def solution(self) -> Solution:
        """The best, with the bound of all that was searched."""
        assert self.best is not None
        return replace(self.best, lower_bound=self.bound(self.asked.costs), searched=tuple(self.searched))
