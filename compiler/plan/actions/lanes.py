"""Jobs over two lanes: when an order of them ends, and a lower bound for all orders.

The lanes are those of a rank. Compute runs its jobs in order, and more slowly beside an exchange that takes SMs from
it. An exchange starts at its place in the order, after the exchanges before it, and runs beside compute. The first job
that reads its result waits for it. Times are whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType


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

    def longer(self, chosen: Collection[int], factor: float) -> Jobs:
        """The jobs, of which the chosen ones take `factor` times as long."""
        time, between = (
            tuple(round(time * factor) if job in chosen else time for job, time in enumerate(times))
            for times in (self.time, self.between)
        )
        return replace(self, time=time, between=between)

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


@dataclass(frozen=True, slots=True)
class Exposed:
    """Nanoseconds in which compute has nothing to do while the communication lane is busy."""

    exchanges: tuple[int, ...]  # by job
    messages: int  # to other ranks


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


def exposed_of(jobs: Jobs, order: Sequence[int], sends: Mapping[int, int] = MappingProxyType({})) -> Exposed:
    """The time of the communication lane in which compute has nothing to do. Arguments as for `run_of`.

    With the time of compute it sums to the end of the order.
    """
    lanes, ends = Lanes(), [0] * len(jobs)
    spans: list[tuple[int, int, bool, int]] = []  # of the communication lane: end, time, whether it is a message, job
    idle: list[tuple[int, int]] = []  # of compute: start, end
    for job in order:
        for awaited in jobs.awaits[job]:
            idle.append((lanes.compute, ends[awaited]))
            lanes.wait(ends[awaited])
        if jobs.exchange[job]:
            ends[job] = lanes.exchange(jobs.time[job])
            spans.append((ends[job], jobs.time[job], False, job))
        else:
            lanes.run(jobs.time[job], jobs.least[job])
        if job in sends:
            spans.append((lanes.exchange(sends[job]), sends[job], True, job))
    idle.append((lanes.compute, lanes.end))
    of_exchanges, messages = [0] * len(jobs), 0
    for end, time, is_message, job in spans:
        exposed = sum(max(0, min(end, last) - max(end - time, first)) for first, last in idle)
        if is_message:
            messages += exposed
        else:
            of_exchanges[job] = exposed
    return Exposed(tuple(of_exchanges), messages)


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
