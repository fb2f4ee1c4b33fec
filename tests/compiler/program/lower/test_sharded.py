"""Places of gathers, zeros and scatters in bodies: how much is gathered at a time, and what overlaps with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from compiler.ir import Body, Program
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates
from compiler.predict.predict import memories, time_plan
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import times_on
from compiler.program.lower.opening_order import opening_order
from compiler.program.proof import prove
from compiler.schedule import schedule_of
from dsl.load import load
from dsl.schema import Spec
from tests.runtime.step.specs import spec
from tests.specs.shipped import SPECS

SCHEDULES = ("1f1b", "zbv", "dualpipev", "dualpipe", "interleaved")


def lowering_of(chosen: Spec) -> Lowering:
    return Lowering(make_plan(chosen), rank_rates(chosen))


def program_of(chosen: Spec, lowering: Lowering) -> Program:
    pp = chosen.parallel.pipeline
    return lowering.program(schedule_of(str(chosen.schedule.name), pp, 2 * pp, 2))


def most_together(body: Body, what: str) -> int:
    """The maximum number of segments of one slot with whole weights, or gradients, at the same time."""
    live: dict[int, set[str]] = defaultdict(set)
    peak = 0
    for i in body.instructions:
        if (i.kind, what) in (("gather", "weights"), ("zeros", "gradients")):
            live[i.slot].add(i.site)
        elif i.kind == "free":
            ended = {name for name in i.reads if name.rpartition(f"_{what}")[1]}
            live[i.slot] -= {site for site in live[i.slot] for name in ended if name.startswith(site.replace(".", "_"))}
        peak = max(peak, *(len(sites) for sites in live.values()), 0) if live else peak
    assert not any(live.values()), "all of it is freed"
    return peak


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_segments_at_a_time(schedule: str) -> None:
    """Weights come one segment ahead, and the gradients of one segment leave while the next one's are made."""
    chosen = spec(2, 2, 4, 4, zero=3, schedule=schedule)
    program = program_of(chosen, lowering_of(chosen))
    bodies = [body for row in program.bodies for body in row]
    assert {most_together(body, "weights") for body in bodies} <= {0, 1, 2}
    assert {most_together(body, "gradients") for body in bodies} <= {0, 1, 2}
    assert max(most_together(body, "weights") for body in bodies) == 2, "some segment's weights come ahead"


def most_put_off(body: Body) -> int:
    """The maximum number of segments of one slot whose I has run and whose W has not, when an I starts."""
    waiting: dict[int, set[str]] = defaultdict(set)
    with_gradients = {(i.slot, i.site) for i in body.instructions if i.kind == "run" and i.phase == "W"}
    peak = 0
    for i in body.instructions:
        if i.kind == "run" and i.phase == "I":
            peak = max(peak, len(waiting[i.slot]))
            waiting[i.slot] |= {i.site} if (i.slot, i.site) in with_gradients else set()
        elif i.kind == "run" and i.phase == "W":
            waiting[i.slot].discard(i.site)
    return peak


@pytest.mark.parametrize("schedule", ("1f1b", "dualpipe"))
@pytest.mark.parametrize("zero", [2, 3])
def test_weight_gradients_are_put_off_by_one_segment(schedule: str, zero: int) -> None:
    """Their inputs are kept until they run. Those of all layers take more memory than sharding saves."""
    chosen = spec(2, 2, 4, 4, zero=zero, schedule=schedule)
    program = program_of(chosen, lowering_of(chosen))
    whole = [body for row in program.bodies for body in row if {i.phase for i in body.instructions} >= {"I", "W"}]
    assert whole and max(map(most_put_off, whole)) <= 2


@pytest.mark.parametrize("sequence", [8192, 32768])
def test_sharded_weights_need_no_more_memory(sequence: int) -> None:
    """Llama 3 8B on 256 H100 without pipeline ranks: the search of orders hides gathers and keeps memory."""
    peaks = [
        max(rank.peak_bytes for rank in memories(time_plan(chosen)))
        for zero in (2, 3)
        for chosen in [
            load(
                SPECS / "llama3-8b.dsc",
                None,
                [f"parallel.zero={zero}", "parallel.pipeline=1", f"train.sequence={sequence}"],
            )
        ]
    ]
    assert peaks[1] < peaks[0]


def test_weights_come_while_the_segment_before_runs() -> None:
    """After the first two gathers, each starts before the segment of the previous gather."""
    chosen = spec(1, 1, 2, 2, zero=3, of="llama", schedule="1f1b")
    body = next(b for b in program_of(chosen, lowering_of(chosen)).bodies[0] if b.actions == ("F0",))
    order = [(i.kind, i.site) for i in body.instructions if i.kind in ("gather", "run")]
    sites = [site for kind, site in order if kind == "gather"]
    assert sites == [site for kind, site in order if kind == "run"], "every segment of this model has weights"
    for before, site in pairwise(sites):
        assert order.index(("gather", site)) < order.index(("run", before)), site


def test_gathers_and_scatters_hold_the_communication_lane() -> None:
    """A gather takes as long as the tail's would; so does a scatter, of gradients in their dtype."""
    chosen = spec(2, 1, 4, 4, zero=3, schedule="1f1b")
    lowering = lowering_of(chosen)
    times, fabric = times_on(lowering, 0), lowering.rates[0].fabric
    (holders, elements), *other_buckets = lowering.plan.sharded["L1.experts"].buckets
    assert not other_buckets and len(holders) == 4
    for kind, reduction, phase in (("gather", "all_gather", "F"), ("scatter", "reduce_scatter", "W")):
        expected = fabric.reduce_s(8 * elements, holders, reduction)  # type: ignore[arg-type]
        assert times[kind, phase, "L1.experts"].time_ns == round(1e9 * expected) > 0


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("schedule", ["zb1p", "dualpipe"])
def test_weights_are_gathered_as_often_as_they_are_used(schedule: str, zero: int) -> None:
    """Also if another segment sums the gradients of a weight, as for a recomputed norm."""
    chosen = spec(2, 2, 4, 4, zero=zero, schedule=schedule)
    chosen = chosen.model_copy(update={"recompute": ("rmsnorm",)})
    lowering = lowering_of(chosen)
    plan, counts = lowering.plan, Counter[tuple[str, str]]()
    for stage in range(len(plan.stages)):
        chains = lowering.chains(stage, plan.ranks_of_stage(stage)[0])
        counts += Counter((i.kind, i.site) for kind in "FIW" for i in (node.instruction for node in chains.chain(kind)))
    moves = {use.site: plan.moves_of(use) for use in plan.uses}
    assert moves == {site: (counts["gather", site], counts["scatter", site]) for site in moves}
    assert {scatters for _, scatters in moves.values()} == {0, 1}


def test_nothing_is_divided_among_one() -> None:
    """With one data rank, or one holder per expert, nothing is sharded: the program equals that of zero = 0."""
    for model, pp in (("llama", 2), ("v3", 1)):
        alone = spec(pp, 1, 1, 4, zero=3, of=model, schedule="1f1b")
        assert not make_plan(alone).sharded
        unsharded = alone.model_copy(update={"parallel": alone.parallel.model_copy(update={"zero": 0})})
        assert program_of(alone, lowering_of(alone)) == program_of(unsharded, lowering_of(unsharded))
    sharded = make_plan(spec(2, 2, 2, 4, zero=3, schedule="1f1b")).sharded
    assert "L1.attention" in sharded and "L1.experts" not in sharded


@pytest.mark.parametrize("zero", [2, 3])
def test_parts_on_two_pipeline_ranks_are_summed_after_the_last_action(zero: int) -> None:
    """MTP reads the embedding on the last pipeline rank. Both ranks shard it; their shards of gradients are summed
    between them. Whole weights are gathered from all holders."""
    chosen = spec(2, 2, 2, 4, zero=zero, schedule="1f1b")
    lowering = lowering_of(chosen)
    program, plan = program_of(chosen, lowering), lowering.plan
    assert [str(collective) for collective in program.epilogue] == ["sum records", "reduce embedding", "sum norm"]
    gathered = ["embedding"] if zero == 3 else [bucket.name for bucket in plan.buckets if len(bucket.holders) > 1]
    assert [collective.name for collective in program.update] == gathered
    assert "embedding" in plan.sharded["embed"].tensors & plan.sharded["M0.input"].tensors
    (on_first, padded), (on_last, _) = plan.sharded["embed"].buckets[0], plan.sharded["M0.input"].buckets[0]
    assert ([*on_first], [*on_last]) == ([0, 1], [2, 3])
    assert padded % 4 == 0, "parts for both, and shares of each part"
    openings = opening_order(plan, [program])
    between = {opening.columns for opening in openings if opening.kind == "reduce" and opening.ranks == (0, 1)}
    assert between == ({"each"} if zero == 3 else {"each", "all"})
    prove(program, plan)
