"""Jobs over two lanes: when an order of them ends, a lower bound for all orders, and a search for a good order.

The lanes are those of a rank. Compute runs its jobs in order, and more slowly beside an exchange that takes SMs from
it. An exchange starts at its place in the order, after the exchanges before it, and runs beside compute. The first job
that reads its result waits for it. The search tries list scheduling under several priority rules, and then annealing
from the best of them with moves of one job, until an order meets the bound. Times are whole nanoseconds, and seeds and
step counts are fixed, so an order depends only on the jobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from random import Random
from types import MappingProxyType

# Annealing, tuned on all pairs of four layers of DeepSeek-V3 with 44 to 88 jobs, where more steps gain nothing.
SEEDS = 6
IN_VAIN = 2  # for a single chain, stop after this many seeds in a row without improvement
STEPS, MOST_JOBS = 6000, 100  # steps per seed; with more jobs than this, fewer steps keep the time the same
HOT, COLD = 0.1, 0.0001  # first and last temperature, as a share of the order's end


@dataclass(frozen=True)
class Jobs:
    """Jobs in base order, one chain after the other."""

    time: tuple[int, ...]  # of compute: beside an exchange
    exchange: tuple[bool, ...]  # whether it runs on the communication lane
    slot: tuple[int, ...]  # its chain
    early: tuple[bool, ...]  # whether it frees memory, so that it should be early if that costs no time
    after: tuple[tuple[int, ...], ...]  # jobs that come before it in any order
    awaits: tuple[tuple[int, ...], ...]  # those of `after` that are exchanges whose results it reads
    between: tuple[int, ...] = ()  # of compute: while no exchange runs; empty if all are as in `time`

    def __len__(self) -> int:
        return len(self.time)

    @property
    def least(self) -> tuple[int, ...]:
        """The least time of each job."""
        return self.between or self.time

    def total(self, exchange: bool) -> int:
        """The least time of all jobs of a lane."""
        return sum(time for time, is_exchange in zip(self.least, self.exchange, strict=True) if is_exchange == exchange)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each job, the jobs that must come after it."""
        readers: list[list[int]] = [[] for _ in self.time]
        for job, earlier in enumerate(self.after):
            for predecessor in earlier:
                readers[predecessor].append(job)
        return tuple(map(tuple, readers))

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The least time before each job can start."""
        heads: list[int] = []
        for earlier in self.after:
            heads.append(max((heads[predecessor] + self.least[predecessor] for predecessor in earlier), default=0))
        return tuple(heads)

    @cached_property
    def tails(self) -> tuple[int, ...]:
        """The least time after each job's end."""
        tails = [0] * len(self)
        for job in range(len(self) - 1, -1, -1):
            tails[job] = max((tails[reader] + self.least[reader] for reader in self.readers[job]), default=0)
        return tuple(tails)


@dataclass(slots=True)
class Lanes:
    """The clocks of a rank's two lanes. Jobs run in the order of the calls. Times are nanoseconds."""

    compute: int = 0  # when the last compute ends
    link: int = 0  # when the last exchange or message ends
    waited: int = 0  # for how long compute has waited

    @property
    def end(self) -> int:
        """When both lanes have ended."""
        return max(self.compute, self.link)

    def wait(self, end: int) -> None:
        """Let compute wait for an exchange that ends at `end`."""
        if end > self.compute:
            self.waited += end - self.compute
            self.compute = end

    def exchange(self, time: int) -> int:
        """Start an exchange after the exchanges and the compute before it. Return its end."""
        self.link = self.end + time
        return self.link

    def run(self, beside: int, between: int) -> int:
        """Run a job that takes `beside` while an exchange runs, and `between` while none does. Return its end."""
        busy = self.link - self.compute  # how long exchanges still run
        if busy >= beside or beside == between:
            self.compute += beside
        elif busy > 0:
            self.compute += busy + between * (beside - busy) // beside
        else:
            self.compute += between
        return self.compute


@dataclass(frozen=True, slots=True)
class OrderEnd:
    """When an order of jobs ends, and for how long each lane is busy until then."""

    end: int
    compute: int
    exchange: int


def run_of(jobs: Jobs, order: Sequence[int], sends: Mapping[int, int] = MappingProxyType({})) -> OrderEnd:
    """Run an order of jobs over the lanes. `sends`: job → time of its message on the link to another rank.

    A message occupies the communication lane as an exchange does, and no job waits for it.
    """
    lanes, ends = Lanes(), [0] * len(jobs)
    for job in order:
        for awaited in jobs.awaits[job]:
            lanes.wait(ends[awaited])
        if jobs.exchange[job]:
            ends[job] = lanes.exchange(jobs.time[job])
        else:
            lanes.run(jobs.time[job], jobs.least[job])
        if job in sends:
            lanes.exchange(sends[job])
    return OrderEnd(lanes.end, lanes.compute - lanes.waited, jobs.total(exchange=True) + sum(sends.values()))


def end_of(jobs: Jobs, order: Sequence[int]) -> int:
    """Return `run_of(jobs, order).end`, in a third of the time: a search calls it some 10,000 times."""
    times, least, exchange, awaits = jobs.time, jobs.least, jobs.exchange, jobs.awaits
    ends = [0] * len(times)
    compute = link = 0
    for job in order:
        for awaited in awaits[job]:
            if ends[awaited] > compute:
                compute = ends[awaited]
        time = times[job]
        if exchange[job]:
            link = ends[job] = (link if link > compute else compute) + time
        elif link <= compute:
            compute += least[job]
        elif link - compute >= time:
            compute += time
        else:
            busy = link - compute
            compute += busy + least[job] * (time - busy) // time
    return compute if compute > link else link


def least_end(jobs: Jobs, sends: Mapping[int, int] = MappingProxyType({})) -> int:
    """A lower bound for all orders: the longest path, and each lane's jobs with the least time before and after."""
    least = max(
        (
            head + time + max(tail, sends.get(job, 0))
            for job, (head, time, tail) in enumerate(zip(jobs.heads, jobs.least, jobs.tails, strict=True))
        ),
        default=0,
    )
    for lane in (False, True):
        of_lane = [job for job in range(len(jobs)) if jobs.exchange[job] == lane]
        if of_lane:
            first, last = min(jobs.heads[job] for job in of_lane), min(jobs.tails[job] for job in of_lane)
            least = max(least, first + jobs.total(lane) + last)
    return least


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
        annealed = _anneal(jobs, listed, Random(seed))
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


def _anneal(jobs: Jobs, start: tuple[int, ...], draw: Random) -> tuple[int, ...]:
    """The best order that an annealing from `start` meets. It ends early at the bound."""
    order, best = list(start), start
    time = least_time = end_of(jobs, start)
    least = least_end(jobs)
    steps = min(STEPS, STEPS * MOST_JOBS // max(1, len(jobs)))
    heat, cooling = HOT * time, (COLD / HOT) ** (1 / steps)
    for _ in range(steps if least_time > least else 0):
        heat *= cooling
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
                if end <= least:
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
