"""Orders of jobs over two lanes: legal, repeatable, never slower than the chains in turn, and close to the best."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise, permutations
from random import Random

import pytest

from compiler.files import native
from compiler.plan.actions import compiled, search
from compiler.plan.actions.lanes import Jobs, OrderEnd, end_of, exposed_of, least_end, run_of
from compiler.plan.actions.order import jobs_of
from compiler.plan.actions.search import best_order
from dsl.load import resolve
from tests.compiler.program.lower.stages import chain, deepseek_v3, lowering_of, small
from tests.specs.shipped import path_of

PAIRS = ["".join(pair) for pair in combinations_with_replacement("FBIW", 2)]


def random_jobs(seed: int, lengths: tuple[int, ...]) -> Jobs:
    """Random chains in which each job comes after some earlier ones; half of the jobs are exchanges."""
    draw = Random(seed)
    time, exchange, slot, after, awaits = [], [], [], [], []
    for number, length in enumerate(lengths):
        first = len(time)
        for index in range(length):
            earlier = [
                job for job in range(first, first + index) if draw.random() < (0.8 if job == len(time) - 1 else 0.2)
            ]
            time.append(draw.randint(1, 20))
            exchange.append(draw.random() < 0.5)
            slot.append(number)
            after.append(tuple(earlier))
            awaits.append(tuple(job for job in earlier if exchange[job]))
    early = tuple(draw.random() < 0.3 for _ in time)
    return Jobs(tuple(time), tuple(exchange), tuple(slot), early, tuple(after), tuple(awaits))


def assert_legal(jobs: Jobs, order: tuple[int, ...]) -> None:
    place = {job: position for position, job in enumerate(order)}
    assert sorted(order) == list(range(len(jobs)))
    assert all(place[earlier] < place[job] for job in range(len(jobs)) for earlier in jobs.after[job])


@pytest.mark.parametrize("seed", range(30))
def test_orders_of_few_jobs_are_the_best_there_are(seed: int) -> None:
    jobs = random_jobs(seed, (4, 3))
    legal = [
        order
        for order in permutations(range(len(jobs)))
        if all(order.index(earlier) < order.index(job) for job in order for earlier in jobs.after[job])
    ]
    best = min(end_of(jobs, order) for order in legal)
    assert least_end(jobs) <= best
    assert_legal(jobs, best_order(jobs))
    assert end_of(jobs, best_order(jobs)) == best


@pytest.mark.parametrize("seed", range(12))
def test_a_pair_is_never_slower_than_its_chains_in_turn(seed: int) -> None:
    lengths = (5 + seed, 15 - seed)
    jobs = random_jobs(seed, lengths)
    order = best_order(jobs)
    assert_legal(jobs, order)
    alone = [random_jobs(seed, lengths[: k + 1]) for k in range(2)]
    first = end_of(alone[0], best_order(alone[0]))
    tail = Jobs(
        *(column[lengths[0] :] for column in (jobs.time, jobs.exchange, jobs.slot, jobs.early)),
        *(
            tuple(tuple(j - lengths[0] for j in row) for row in rows[lengths[0] :])
            for rows in (jobs.after, jobs.awaits)
        ),
    )
    assert least_end(jobs) <= end_of(jobs, order) <= first + end_of(tail, best_order(tail))


def test_waiting_holds_compute_up() -> None:
    """Job 2 reads an exchange of 10, which overlaps compute of 3; another exchange queues behind it."""
    jobs = Jobs(
        time=(10, 3, 2, 4),
        exchange=(True, False, False, True),
        slot=(0, 0, 0, 0),
        early=(False,) * 4,
        after=((), (), (0,), (1,)),
        awaits=((), (), (0,), ()),
    )
    assert end_of(jobs, (0, 1, 3, 2)) == 14  # 10 + 4 on the link; compute ends at 12
    assert end_of(jobs, (0, 2, 1, 3)) == 10 + 2 + 3 + 4
    assert end_of(jobs, (1, 3, 0, 2)) == 3 + 4 + 10 + 2


@pytest.mark.parametrize("kinds", PAIRS)
def test_every_pair_of_four_layers_of_deepseek_v3(kinds: str) -> None:
    planned = deepseek_v3()
    chains = [chain(planned, 5, kind) for kind in kinds]
    jobs = jobs_of(chains)
    order = best_order(jobs)
    assert_legal(jobs, order)
    apart = sum(end_of(lone_jobs, best_order(lone_jobs)) for lone_jobs in map(jobs_of, ([c] for c in chains)))
    assert least_end(jobs) <= end_of(jobs, order) <= apart
    if set(kinds) & set("FBI"):
        assert end_of(jobs, order) < 0.95 * apart, "some of each one's exchanges is hidden under the other"


def test_an_order_is_the_same_each_time() -> None:
    jobs = jobs_of([chain(small(), 0, "F"), chain(small(), 1, "B")])
    first = best_order(jobs)
    best_order.cache_clear()
    assert best_order(jobs) == first


@pytest.mark.parametrize("seed", range(12))
def test_c_and_python_find_the_same_order(seed: int) -> None:
    if compiled.loaded() is None:
        pytest.skip(f"{native.build(compiled.SOURCE)}")
    jobs = random_jobs(seed, ((7,), (9, 6), (20, 30), (60, 50))[seed % 4])
    jobs = replace(jobs, between=tuple(-(-time // 2) for time in jobs.time)) if seed % 3 else jobs
    cooling = compiled.Cooling(500, 0.1 * end_of(jobs, range(len(jobs))), 0.99, least_end(jobs))
    for start in (tuple(range(len(jobs))), best_order(jobs)):
        found = compiled.anneal(jobs, start, Random(seed), cooling)
        assert found == search.anneal_in_python(jobs, start, Random(seed), cooling)


def test_times_that_doubles_cannot_hold_are_annealed_in_python() -> None:
    jobs = replace(random_jobs(0, (4, 3)), time=(1 << 60,) * 7)
    assert compiled.anneal(jobs, tuple(range(7)), Random(0), compiled.Cooling(10, 1.0, 0.9, 0)) is None
    assert_legal(jobs, best_order(jobs))


def test_orders_are_found_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = random_jobs(2, (9, 6))
    found = best_order.__wrapped__(jobs)
    monkeypatch.setattr(compiled, "loaded", lambda: None)
    assert best_order.__wrapped__(jobs) == found


@pytest.mark.parametrize("seed", [3, 4, 17])
def test_a_search_ends_with_an_order_at_the_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, tried = random_jobs(seed, (4, 3)), list[int]()

    def counted(jobs: Jobs, order: Sequence[int]) -> int:
        tried.append(end_of(jobs, order))
        return tried[-1]

    monkeypatch.setattr(compiled, "loaded", lambda: None)
    monkeypatch.setattr(search, "end_of", counted)
    order = best_order.__wrapped__(jobs)  # whether or not it is remembered
    least = least_end(jobs)
    assert end_of(jobs, order) == least < tried[0]
    assert len(tried) < search.STEPS / 10


def test_a_lone_backward_fills_its_exchanges() -> None:
    """A lone B overlaps its exchanges with weight gradients and the shared expert: it takes hardly more than I."""
    planned = deepseek_v3()
    B, I, W = (jobs_of([chain(planned, 5, kind)]) for kind in "BIW")
    apart = end_of(I, best_order(I)) + end_of(W, best_order(W))
    end = end_of(B, best_order(B))
    assert end < 0.82 * apart  # a lone W has all SMs; during exchanges it has the remaining ones
    assert 1 - (end - B.total(exchange=False)) / B.total(exchange=True) > 0.6  # of the exchanges is hidden


@pytest.mark.parametrize(("stage", "zero"), [(0, 0), (1, 0), (1, 2)])
def test_gradients_are_added_in_base_order_for_any_rates(stage: int, zero: int) -> None:
    """Two weight gradients of one stage add to one buffer: slot 0 first, each in its chain's order. The same holds for
    scatters of sharded gradients, and for two segments that share a tensor, such as the head."""
    lowering = lowering_of(resolve(path_of("quickstart"), overrides=[f"parallel.zero={zero}"]).spec)
    chains = [chain(lowering, stage, "B"), chain(lowering, stage, "B")]
    jobs = jobs_of(chains)
    instructions = [node.instruction for nodes in chains for node in nodes if node.uses_lane]
    ancestors: list[set[int]] = []
    for earlier in jobs.after:
        ancestors.append({*earlier}.union(*(ancestors[job] for job in earlier)))
    order, adding = best_order(jobs), defaultdict[str, list[int]](list)
    for job in order:
        for parameter in instructions[job].params if instructions[job].phase == "W" else ():
            adding[parameter].append(job)
        if instructions[job].kind == "scatter":
            adding[f"scatter {instructions[job].site}"].append(job)
    for parameter, adders in adding.items():
        assert adders == sorted(adders) and {jobs.slot[job] for job in adders} == {0, 1}, parameter
        assert all(first in ancestors[second] for first, second in pairwise(adders)), parameter
    assert any(parameter.startswith("scatter ") for parameter in adding) == (zero > 0)
    assert (len(adding.get("head", ())) == 4) == (stage == 1), "of the model and of MTP, twice"


def with_paces(jobs: Jobs, seed: int) -> Jobs:
    """The jobs, each up to twice as fast while no exchange runs."""
    draw = Random(seed)
    between = (t if x else t - draw.randint(0, t // 2) for t, x in zip(jobs.time, jobs.exchange, strict=True))
    return replace(jobs, between=tuple(between))


def by_moments(jobs: Jobs, order: tuple[int, ...], sends: dict[int, int]) -> tuple[Fraction, Fraction]:
    """End of an order and the time it computes, event by event: at every event the speeds are determined again."""
    clock, pending, link, ends = Fraction(0), list(order), list[tuple[int | None, Fraction]](), set[int]()
    job, open_, computed = -1, Fraction(0), Fraction(0)  # the running job, and its remaining share
    while pending or link or open_:
        while not open_ and pending and all(earlier in ends for earlier in jobs.awaits[pending[0]]):
            first = pending.pop(0)
            if jobs.exchange[first]:
                link.append((first, Fraction(jobs.time[first])))
            else:
                job, open_ = first, Fraction(1)
        pace = (jobs.time if link else jobs.between or jobs.time)[job]
        step = min([time for _, time in link[:1]] + [open_ * pace] * bool(open_))
        clock += step
        if open_:
            computed, open_ = computed + step, open_ - step / pace
            if not open_ and job in sends:
                link.append((None, Fraction(sends[job]) + (0 if link else step)))
        if link:
            (transfer, time), *waiting = link
            link = [(transfer, time - step), *waiting] if time > step else waiting
            ends |= {transfer} - {None} if time == step and transfer is not None else set()
    return clock, computed


@pytest.mark.parametrize("seed", range(40))
def test_compute_is_slower_beside_an_exchange(seed: int) -> None:
    """Orders take the time counted event by event, up to the rounding of a job, and never less than the bound."""
    jobs = with_paces(random_jobs(seed, (4, 3)), seed)
    makers = [job for job in range(len(jobs)) if not jobs.exchange[job]]
    sends = {job: 5 for job in makers[-1:]} if seed % 2 else {}
    order = best_order(jobs)
    assert_legal(jobs, order)
    lane_run, (end, busy) = run_of(jobs, order, sends), by_moments(jobs, order, sends)
    assert abs(lane_run.end - end) <= len(jobs) and abs(lane_run.compute - busy) <= len(jobs)
    assert least_end(jobs, sends) <= lane_run.end and end_of(jobs, order) == run_of(jobs, order).end


def test_a_message_queues_behind_earlier_exchanges() -> None:
    """A job of 4 and then a message of 10; the exchange after it queues, and the order ends when both have ended."""
    jobs = Jobs(
        time=(4, 3, 6),
        exchange=(False, True, False),
        slot=(0, 0, 0),
        early=(False,) * 3,
        after=((), (0,), (0,)),
        awaits=((), (), ()),
    )
    assert run_of(jobs, (0, 1, 2), {0: 10}) == OrderEnd(end=4 + 10 + 3, compute=10, exchange=13)
    assert run_of(jobs, (0, 2, 1), {2: 10}) == OrderEnd(end=4 + 6 + 10 + 3, compute=10, exchange=13)
    assert run_of(jobs, (0, 1, 2), {2: 0}).end == end_of(jobs, (0, 1, 2)) == 10


@pytest.mark.parametrize("seed", range(20))
def test_exposed_time_equals_that_of_a_clock(seed: int) -> None:
    """Each unit of time in which no compute runs belongs to the exchange or message that runs in it."""
    jobs, draw = random_jobs(seed, (6, 5)), Random(seed)
    order = best_order(jobs)
    sends = {job: draw.randint(1, 15) for job in order if not jobs.exchange[job] and draw.random() < 0.2}
    exposed = exposed_of(jobs, order, sends)
    run = run_of(jobs, order, sends)
    computing, linked = _clock(jobs, order, sends)
    assert len(linked) == run.end and sum(computing) == run.compute
    alone = [use for use, computes in zip(linked, computing, strict=True) if not computes]
    assert exposed.messages == alone.count("message")
    assert exposed.exchanges == tuple(alone.count(job) for job in range(len(jobs)))
    assert run.compute + sum(exposed.exchanges) + exposed.messages == run.end


def _clock(jobs: Jobs, order: Sequence[int], sends: dict[int, int]) -> tuple[list[bool], list[int | str | None]]:
    """For each unit of time, whether compute runs, and what runs on the other lane."""
    computing: list[bool] = []
    linked: list[int | str | None] = []
    ends: dict[int, int] = {}

    def link(use: int | str, time: int) -> int:
        linked.extend([None] * (len(computing) - len(linked)))
        linked.extend([use] * time)
        return len(linked)

    for job in order:
        until = max((ends[awaited] for awaited in jobs.awaits[job]), default=0)
        computing.extend([False] * (until - len(computing)))
        if jobs.exchange[job]:
            ends[job] = link(job, jobs.time[job])
        else:
            computing.extend([True] * jobs.time[job])
        if job in sends:
            link("message", sends[job])
    end = max(len(computing), len(linked))
    return computing + [False] * (end - len(computing)), linked + [None] * (end - len(linked))
