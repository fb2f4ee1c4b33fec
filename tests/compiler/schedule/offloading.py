"""Named schedules with copies to the host, so that ranks hold less."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from compiler.schedule import schedule_of
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import held_at_most
from compiler.schedule.solver.offload import add_copies


def offloading(name: str, ranks: int, micro_batches: int, share: Fraction) -> Schedule:
    """The schedule with copies, so that each rank holds the given share of what it otherwise holds."""
    plain = schedule_of(name, ranks, micro_batches, 2)
    peaks = held_at_most(plain, Fraction(1))
    caps = [max(Fraction(1), Fraction(int(peak * share))) for peak in peaks]
    copied = add_copies(plain, replace(Costs(), O=Fraction(1), R=Fraction(1)), caps)
    assert copied is not None and sum(held_at_most(copied[0], Fraction(1))) < sum(peaks)
    copied[0].check()
    return copied[0]
