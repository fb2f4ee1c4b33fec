"""Random problems, and a check of what must hold for every solution."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import strategies as st

from compiler.schedule import SCHEDULES
from compiler.schedule.costs import PAIR_KINDS, Costs
from compiler.schedule.simulate import peak_activations, simulate
from compiler.schedule.weights import Weight

times = st.integers(1, 12).map(lambda tenths: Fraction(tenths, 4))


@st.composite
def costs(draw: st.DrawFn, num_ranks: int) -> Costs:
    """Costs with any table of pairs, latency, uneven stages (by kind, too) and ranks, each of them now and then."""
    kind_times = {kind: draw(times) for kind in "FIW"}
    table = Costs(**kind_times, B=draw(st.none() | st.just(kind_times["I"] + kind_times["W"] * Fraction(3, 4))))
    pairs = []
    for kinds in draw(st.lists(st.sampled_from(PAIR_KINDS), unique=True, max_size=len(PAIR_KINDS))):
        lone = [table.lone_time(kind) for kind in kinds]
        pairs.append((kinds, max(max(lone), sum(lone) * Fraction(draw(st.integers(5, 11)), 10))))
    factor = st.sampled_from([Fraction(3, 4), Fraction(1), Fraction(3, 2)])
    weights = st.lists(factor, min_size=num_ranks, max_size=num_ranks)
    by_kind = st.lists(st.builds(Weight, factor, factor, factor, factor), min_size=num_ranks, max_size=num_ranks)
    optional_weights = st.just([]) | weights
    return Costs(
        **kind_times,
        B=table.B,
        pairs=tuple(sorted(pairs)),
        latency=draw(st.sampled_from([Fraction(0), Fraction(0), Fraction(1, 3)])),
        stages=tuple(draw(optional_weights | by_kind)),
        ranks=tuple(draw(optional_weights)),
    )


def named(
    num_ranks: int, num_micro_batches: int, table: Costs, cap: int | None, chunks: int = 2
) -> dict[str, Fraction]:
    """Makespans of all named schedules that fit the cap; costs and cap are those of 1/P of the model."""
    makespans = {}
    for name, row in SCHEDULES.items():
        if row.has_size(num_ranks, num_micro_batches):
            schedule = row.generate(num_ranks, num_micro_batches, chunks)
            parts = schedule.stage_placement.num_stages(num_ranks) // num_ranks
            if cap is None or max(peak_activations(schedule)) <= cap * parts:
                scaled = table.recut(num_ranks, num_ranks * parts)
                makespans[name] = simulate(schedule, scaled).makespan
    return makespans
