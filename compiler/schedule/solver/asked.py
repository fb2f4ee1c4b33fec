"""What `auto` is asked for, in the units of the asker and of each placement, and what is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement
from compiler.schedule.bound import lower_bound
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import held_at_most, simulate

Cap = Fraction | int | tuple[Fraction | int, ...]  # of every rank, or one for each
lower_bound_of = lru_cache(maxsize=256)(lower_bound)  # asked for before a search, by it, and for what was found


@dataclass(frozen=True)
class Asked:
    """Sizes, costs of one of `num_stages` stages, and a cap on activations of such a stage, of all ranks or of each."""

    num_ranks: int
    num_micro_batches: int
    costs: Costs
    num_stages: int
    cap: Cap | None

    def costs_on(self, placement: StagePlacement) -> Costs:
        """Costs of the model cut into the stages of a placement."""
        return self.costs.recut(self.num_stages, placement.num_stages(self.num_ranks))

    def caps(self, cap: Cap) -> tuple[Fraction, ...]:
        """A cap, by rank."""
        return tuple(map(Fraction, cap if isinstance(cap, tuple) else (cap,) * self.num_ranks))

    def caps_on(self, placement: StagePlacement, cap: Cap) -> tuple[Fraction, ...]:
        """A cap by rank, in activations of a placement's stages."""
        stages = placement.num_stages(self.num_ranks)
        return tuple(self.costs.in_parts(each * stages / self.num_stages) for each in self.caps(cap))

    def cap_on(self, placement: StagePlacement, cap: Cap | None) -> Fraction | None:
        """The most that a rank may hold, in activations of a placement's stages."""
        return None if cap is None else max(self.caps_on(placement, cap))

    def holds(self, held: Sequence[Fraction], cap: Cap | None) -> bool:
        """Whether so much, by rank, is under a cap."""
        return cap is None or all(each <= most for each, most in zip(held, self.caps(cap), strict=True))

    def bound(self, placement: StagePlacement, cap: Cap | None) -> Fraction:
        P, N = self.num_ranks, self.num_micro_batches
        caps = None if cap is None else self.caps_on(placement, cap)
        return lower_bound_of(placement, P, N, self.costs_on(placement), caps)

    def held(self, schedule: Schedule) -> tuple[Fraction, ...]:
        """The most that each rank of a schedule holds, in the unit of the cap."""
        peaks = held_at_most(schedule, self.costs.keeps)
        return tuple(each * self.num_stages / schedule.num_stages for each in peaks)

    def timed(self, origin: str, schedule: Schedule) -> Found:
        makespan = simulate(schedule, self.costs_on(schedule.stage_placement)).makespan
        return Found(makespan, self.held(schedule), origin, schedule)


@dataclass(frozen=True)
class Found:
    """A schedule, how long it takes, the most that each rank holds in the unit of the cap, and what it came from."""

    makespan: Fraction
    held: tuple[Fraction, ...]
    origin: str
    schedule: Schedule

    def key(self) -> tuple[Fraction, bool]:
        """The least is the best."""
        return self.makespan, self.schedule.stage_placement == BIDIRECTIONAL


def checked(asked: Asked) -> Asked:
    """What was asked; ValueError where nothing runs with such sizes, weights or caps."""
    if asked.num_ranks < 1 or asked.num_micro_batches < 1:
        raise ValueError(
            f"auto needs at least 1 rank and 1 micro-batch, got {asked.num_ranks} and {asked.num_micro_batches}"
        )
    least = asked.num_stages // asked.num_ranks  # a micro-batch comes by so often before it goes back
    if isinstance(asked.cap, tuple) and len(asked.cap) != asked.num_ranks:
        raise ValueError(f"auto needs a cap for each of {asked.num_ranks} ranks, got {len(asked.cap)}")
    if asked.cap is not None and min(asked.caps(asked.cap)) < least:
        what = f"{least} activation{'s' if least > 1 else ''}"
        raise ValueError(
            f"auto cannot run with a cap of {float(min(asked.caps(asked.cap))):g}: "
            f"a rank holds at least {what}, use cap = {least}"
        )
    asked.costs.check(asked.num_ranks, asked.num_stages)
    return asked
