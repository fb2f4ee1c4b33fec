"""A search for a good order of jobs over two lanes.

It tries list scheduling under several priority rules, and then annealing from the best of them with moves of one job,
until an order meets the bound. Seeds and step counts are fixed, so an order depends only on the jobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from random import Random

from compiler.plan.actions import compiled
from compiler.plan.actions.lanes import Jobs, Lanes, end_of, least_end

# Annealing, tuned on all pairs of four layers of DeepSeek-V3 with 44 to 88 jobs, where more steps gain nothing.
SEEDS = 6
IN_VAIN = 2  # for a single chain, stop after this many seeds in a row without improvement
STEPS, MOST_JOBS = 6000, 100  # steps per seed; with more jobs than this, fewer steps keep the time the same
HOT, COLD = 0.1, 0.0001  # first and last temperature, as a share of the order's end


@cache
def best_order(jobs: Jobs) -> tuple[int, ...]:
    """The best order found. It never ends later than the chains one after the other, each in its best order.

    A pure function of about a hundred integers. Results are cached, as the plans of a search share most of their jobs.
    """
    least, base = least_end(jobs), tuple(range(len(jobs)))
    if end_of(jobs, base) == least:
        return _fill_waits(jobs, base)
    best = base
    for order in _candidates(jobs, base):
        best = min(best, order, key=lambda order: end_of(jobs, order))
        if end_of(jobs, best) == least:
            break
    return _fill_waits(jobs, _free_memory_early(jobs, best))


def _candidates(jobs: Jobs, base: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Orders, the ones that are cheapest to find first. Each annealing starts from the best order before it."""
    listed = base
    for rule in _rules(jobs):
        order = tuple(_list_schedule(jobs, rule))
        listed = min(listed, order, key=lambda order: end_of(jobs, order))
        yield order
    failures, single_slot = 0, len(set(jobs.slot)) == 1
    for seed in range(SEEDS):
        annealed = anneal(jobs, listed, seed)
        failures = 0 if end_of(jobs, annealed) < end_of(jobs, listed) else failures + 1
        if single_slot and failures == IN_VAIN:
            break
        listed = min(listed, annealed, key=lambda order: end_of(jobs, order))
        yield listed
    slots = sorted(set(jobs.slot))
    if len(slots) > 1:
        chains = [[job for job in base if jobs.slot[job] == slot] for slot in slots]
        yield tuple(chain[job] for chain in chains for job in best_order(_jobs_of_chain(jobs, chain)))


def _jobs_of_chain(jobs: Jobs, chain: list[int]) -> Jobs:
    """The jobs of one chain alone."""
    place = {job: index for index, job in enumerate(chain)}

    def within(predecessors: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(place[job] for job in predecessors if job in place)

    return Jobs(
        time=tuple(jobs.time[job] for job in chain),
        exchange=tuple(jobs.exchange[job] for job in chain),
        between=tuple(jobs.between[job] for job in chain) if jobs.between else (),
        slot=(0,) * len(chain),
        early=tuple(jobs.early[job] for job in chain),
        after=tuple(within(jobs.after[job]) for job in chain),
        awaits=tuple(within(jobs.awaits[job]) for job in chain),
    )


# ---------------------------------------------------------------- list scheduling

Rule = Callable[[int], tuple[int, ...]]  # job -> priority, least first


def _rules(jobs: Jobs) -> Iterator[Rule]:
    """Priority rules: the longest path to the end, most exchange on it, the nearest exchange, one slot or the other."""
    tails, links, distance = jobs.tails, [0] * len(jobs), [0] * len(jobs)
    unreachable = sum(jobs.time) + 1
    for job in range(len(jobs) - 1, -1, -1):
        later = jobs.readers[job]
        links[job] = max((links[o] + (jobs.time[o] if jobs.exchange[o] else 0) for o in later), default=0)
        distance[job] = min((0 if jobs.exchange[o] else jobs.time[o] + distance[o] for o in later), default=unreachable)
    slot_time = [sum(t for t, s in zip(jobs.time, jobs.slot, strict=True) if s == slot) for slot in jobs.slot]
    yield lambda job: (-tails[job], job)
    yield lambda job: (-links[job], -tails[job], job)
    yield lambda job: (distance[job] == unreachable, distance[job], -tails[job], job)
    yield lambda job: (distance[job] == unreachable, jobs.slot[job], -tails[job], job)
    yield lambda job: (distance[job] == unreachable, -jobs.slot[job], -tails[job], job)
    yield lambda job: (-slot_time[job], -tails[job], job)


def _list_schedule(jobs: Jobs, rule: Rule) -> list[int]:
    """List scheduling: jobs that can start without waiting go first, exchanges before compute, by urgency."""
    missing = [len(earlier) for earlier in jobs.after]
    ready = [job for job in range(len(jobs)) if not missing[job]]
    lanes, ends = Lanes(), [0] * len(jobs)
    order: list[int] = []
    while ready:
        _, _, _, job = min(
            (max(lanes.compute, *(ends[o] for o in jobs.awaits[job]), 0), not jobs.exchange[job], rule(job), job)
            for job in ready
        )
        lanes.wait(max((ends[o] for o in jobs.awaits[job]), default=0))
        if jobs.exchange[job]:
            ends[job] = lanes.exchange(jobs.time[job])
        else:
            lanes.run(jobs.time[job], jobs.least[job])
        order.append(job)
        ready.remove(job)
        for reader in jobs.readers[job]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    assert len(order) == len(jobs), "a job comes after itself"
    return order


# ---------------------------------------------------------------- improving


def anneal(jobs: Jobs, start: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """The best order that an annealing from `start` meets. It ends early at the bound."""
    time, draw = end_of(jobs, start), Random(seed)
    steps = min(STEPS, STEPS * MOST_JOBS // max(1, len(jobs)))
    cooling = compiled.Cooling(steps, HOT * time, (COLD / HOT) ** (1 / steps), least_end(jobs))
    return compiled.anneal(jobs, start, draw, cooling) or anneal_in_python(jobs, start, draw, cooling)


def anneal_in_python(jobs: Jobs, start: tuple[int, ...], draw: Random, cooling: compiled.Cooling) -> tuple[int, ...]:
    """What `compiled` does in C, for machines without a C compiler. Returns the same order, twenty times as slowly."""
    order, best, heat = list(start), start, cooling.heat
    time = least_time = end_of(jobs, start)
    for _ in range(cooling.steps if least_time > cooling.least else 0):
        heat *= cooling.factor
        position = _below(draw, len(order))
        low, high = _room(jobs, order, position)
        if low == high:
            continue
        target = low + _below(draw, high - low)
        moved = _move_job(order, position, target + (target >= position))
        end = end_of(jobs, moved)
        if end <= time or draw.random() < math.exp((time - end) / heat):
            order, time = moved, end
            if end < least_time:
                best, least_time = tuple(moved), end
                if end <= cooling.least:
                    break
    return best


def _below(draw: Random, count: int) -> int:
    """A random number below `count`: the same as `randrange` draws, in half the time."""
    bits = count.bit_length()
    number = draw.getrandbits(bits)
    while number >= count:
        number = draw.getrandbits(bits)
    return number


def _free_memory_early(jobs: Jobs, order: tuple[int, ...]) -> tuple[int, ...]:
    """The order with jobs that free memory moved as early as possible without a later end."""
    settled, time = list(order), end_of(jobs, order)
    for job in (job for job in order if jobs.early[job]):
        position = settled.index(job)
        low, _ = _room(jobs, settled, position)
        candidates = (
            _move_job(settled, position, target) for target in range(low, position, 1 + (position - low) // 8)
        )
        settled = next((moved for moved in candidates if end_of(jobs, moved) <= time), settled)
    return tuple(settled)


def _fill_waits(jobs: Jobs, order: tuple[int, ...]) -> tuple[int, ...]:
    """The order with compute between an exchange and the next one that reads its result, unless it then ends later.

    A dispatch waits on the host for its counts, and meanwhile the device runs what was launched before.
    """
    result, time = list(order), end_of(jobs, order)
    for job in (job for job in order if jobs.exchange[job] and jobs.awaits[job]):
        position = result.index(job)
        if result[position - 1] in jobs.awaits[job]:
            _, high = _room(jobs, result, position)
            later = (
                _move_job(result, position, target)
                for target in range(position + 1, high + 1)
                if not jobs.exchange[result[target]]
            )
            result = next((moved for moved in later if end_of(jobs, moved) <= time), result)
    return tuple(result)


def _room(jobs: Jobs, order: Sequence[int], position: int) -> tuple[int, int]:
    """The first and the last place to which the job at a place can move."""
    earlier, later = jobs.after[order[position]], jobs.readers[order[position]]
    low, high = position, position
    while low > 0 and order[low - 1] not in earlier:
        low -= 1
    while high < len(order) - 1 and order[high + 1] not in later:
        high += 1
    return low, high


def _move_job(order: Sequence[int], position: int, target: int) -> list[int]:
    moved = [*order[:position], *order[position + 1 :]]
    moved.insert(target, order[position])
    return moved
