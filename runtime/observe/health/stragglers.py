"""Finds ranks that are slower than ranks with the same work, from seconds that are equal on all ranks.

All ranks wait for the slowest one, so the time of a step does not tell which rank is slow. Its own work does: the
seconds in which it computes or waits for samples, and for no other rank. They are compared with those of its peers, the
ranks that do the same work, in the same row of metrics: what slows all of them at once cancels out. A rank without
peers, as in a pipeline without data parallelism, is compared with its own earlier share of the work of all ranks, so
only a change is found.

Experts have unequal loads. A rank may take longer by the factor by which its experts computed more rows, and only what
exceeds this factor counts. So the load of an expert never looks like a slow device.

The seconds in which a rank waits for others (messages, exchanges, sums) are no sign of a slow device: a straggler waits
less than its peers, because they wait for it. If all ranks work alike, and still one of them waits longer for its
messages or exchanges than its peers do, a link is slow: its own, or one between ranks that it waits for.

A rank is reported if its times in the last 16, 32 or 64 samples agree that it is slower. Let the value of a sample be
the logarithm of its ratio. Then

- the median of the values is above `LIMIT` by several of its standard errors. One error follows from the median
  absolute deviation, and from that of the differences of successive samples: single slow steps have no weight, and a
  noisy machine needs more samples. The other follows from the medians of blocks of four samples: it grows with noise
  that lasts for several steps;
- almost all samples, and the median of each block, are above half of the limit. A burst of a few steps does not decide.

Rows of very short steps are summed to samples of at least `SAMPLE_S`, because a system may run one process more often
than another for about that long. tests/runtime/observe/test_stragglers.py measures how often and how soon this finds a
slow rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, median_low, stdev
from typing import Literal, NamedTuple

from runtime.contract import Mesh
from runtime.system.outcome import ReportedError

Part = Literal["compute", "data", "message", "exchange"]
LINK_PARTS: tuple[Part, ...] = ("message", "exchange")

WARM_UP = 2  # rows after a start that are left out: they allocate memory, and wait for the first samples
SAMPLE_S = 0.1
WINDOWS = (16, 32, 64)  # samples
BLOCK = 4  # samples
LIMIT = math.log(1.15)  # of the median
HALF = LIMIT / 2
SAMPLE_ERRORS, BLOCK_ERRORS = 3.5, 3.0  # standard errors above the limit
AGREEING = 0.9  # share of samples above half of the limit
LEAST_BEFORE, MOST_BEFORE = 32, 256  # earlier samples that a rank without peers is compared with
LEAST_S = 1e-6  # of work
MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean, of normal samples
NORMAL_MAD = 1.4826  # standard deviation over median absolute deviation, of normal samples


@dataclass(frozen=True)
class RankSeconds:
    """Seconds of a rank in a row of metrics: its own work (`compute_s`, `data_s`), waiting for other ranks
    (`message_s`, `exchange_s`), and all (`wall_s`). `expert_rows`: rows that its experts computed."""

    compute_s: float
    data_s: float
    message_s: float
    exchange_s: float
    wall_s: float
    expert_rows: int = 0

    @property
    def own_s(self) -> float:
        return max(self.compute_s + self.data_s, LEAST_S)

    def __add__(self, other: RankSeconds) -> RankSeconds:
        return RankSeconds(
            self.compute_s + other.compute_s,
            self.data_s + other.data_s,
            self.message_s + other.message_s,
            self.exchange_s + other.exchange_s,
            self.wall_s + other.wall_s,
            self.expert_rows + other.expert_rows,
        )


@dataclass(frozen=True)
class Straggler:
    """A slow rank. `part`: what takes long. `since`: the first step that shows it.

    `factor`: how many times as long its work takes as that of its peers. For LINK_PARTS, where a link is slow and not
    its device: how many times as long its peers would take if they waited as long.
    """

    rank: int
    part: Part
    factor: float
    since: int

    def text(self, host: str) -> str:
        """Return a sentence. `host`: the machine of the rank."""
        reason = {
            "compute": "computes",
            "data": "waits for its samples and computes",
            "message": "waits for pipeline messages and computes",
            "exchange": "waits for exchanges and computes",
        }[self.part]
        whom = f"rank {self.rank} on {host} {reason} {self.factor:.2f} times as long as its peers since step"
        link = "; all ranks compute alike, so a link that it waits for is slow" if self.part in LINK_PARTS else ""
        return f"{whom} {self.since:,}{link}"


class StragglerError(ReportedError):
    """A run that goes on without the device of a straggler. All ranks raise it, after they have saved a checkpoint."""

    def __init__(self, step: int, straggler: Straggler, host: str, *, of_peer: bool) -> None:
        text = f"step {step}: {straggler.text(host)}; the run goes on without its device"
        super().__init__(text, of_peer=of_peer, slowdown=straggler.factor)


class StragglerChange(NamedTuple):
    """A straggler that was found (`began`), or that is no longer slow."""

    straggler: Straggler
    began: bool


class _ComparedSample(NamedTuple):
    """A rank in a sample. Logarithms of ratios to its peers: `slow` is corrected for the load of experts, `raw` is not.
    `waits`: what longer waits for messages and exchanges add, relative to the work of the peers. `data`: whether most
    of its excess is waiting for samples."""

    step: int
    slow: float
    raw: float
    waits: tuple[float, float]
    data: bool


@dataclass
class _RankHistory:
    samples: deque[_ComparedSample] = field(default_factory=lambda: deque(maxlen=WINDOWS[-1]))
    before: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_BEFORE))  # without peers
    recent: deque[tuple[float, float]] = field(default_factory=deque)  # not yet part of `before`


class Stragglers:
    """Follows the rows of a run. `peers`: a partition of the ranks into groups that do the same work.

    `active`: the stragglers at present, by rank.
    """

    def __init__(self, peers: Sequence[Sequence[int]]) -> None:
        self._peers = [tuple(group) for group in peers]
        self._ranks = sorted(rank for group in peers for rank in group)
        assert self._ranks == [*range(len(self._ranks))], "every rank is in one group"
        self._histories = [_RankHistory() for _ in self._ranks]
        self._num_rows = 0
        self._sum: tuple[int, list[RankSeconds]] | None = None  # the first step of a sample that is not complete
        self.active: dict[int, Straggler] = {}

    def after(self, step: int, ranks: Sequence[RankSeconds]) -> list[StragglerChange]:
        """Record the row of a step, with one entry for each rank. Return what has changed."""
        self._num_rows += 1
        if self._num_rows <= WARM_UP or len(self._ranks) < 2:
            return []
        first, total = self._sum or (step, [])
        total = [sum_of + work for sum_of, work in zip(total, ranks, strict=True)] if total else [*ranks]
        self._sum = (first, total)
        if max(work.wall_s for work in total) < SAMPLE_S:
            return []
        self._sum = None
        self._add_sample(first, total)
        return [*self._changes()]

    # ---- samples

    def _add_sample(self, step: int, ranks: Sequence[RankSeconds]) -> None:
        for group in self._peers:
            if len(group) > 1:
                self._compare_with_peers(step, group, ranks)
            else:
                self._compare_with_itself(step, group[0], ranks)

    def _compare_with_peers(self, step: int, group: Sequence[int], ranks: Sequence[RankSeconds]) -> None:
        works = [ranks[rank] for rank in group]
        own_s = _medians_of_others([work.own_s for work in works])
        data_s = _medians_of_others([work.data_s for work in works])
        rows = _medians_of_others([work.expert_rows for work in works])
        waits = [_medians_of_others([getattr(work, f"{part}_s") for work in works]) for part in LINK_PARTS]
        for index, (rank, work) in enumerate(zip(group, works, strict=True)):
            raw = math.log(work.own_s / own_s[index])
            excess_s = (work.message_s - waits[0][index], work.exchange_s - waits[1][index])
            message, exchange = (math.log1p(max(0.0, seconds) / own_s[index]) for seconds in excess_s)
            is_data = 2 * (work.data_s - data_s[index]) > work.own_s - own_s[index]
            slow = raw - _load(work.expert_rows, rows[index])
            self._histories[rank].samples.append(_ComparedSample(step, slow, raw, (message, exchange), is_data))

    def _compare_with_itself(self, step: int, rank: int, ranks: Sequence[RankSeconds]) -> None:
        work, others = ranks[rank], [work for other, work in enumerate(ranks) if other != rank]
        raw = math.log(work.own_s / median(other.own_s for other in others))
        load = math.log(max(1, work.expert_rows) / max(1.0, median(other.expert_rows for other in others)))
        history = self._histories[rank]
        if rank not in self.active:
            history.recent.append((raw, load))
            if len(history.recent) > WINDOWS[0]:
                history.before.append(history.recent.popleft())
        if len(history.before) < LEAST_BEFORE:
            return
        raw -= median(raw_before for raw_before, _ in history.before)
        load -= median(load_before for _, load_before in history.before)
        data_s = median(other.data_s for other in others)
        is_data = 2 * (work.data_s - data_s) > work.own_s * (1 - math.exp(-max(0.0, raw)))
        history.samples.append(_ComparedSample(step, raw - max(0.0, load), raw, (0.0, 0.0), is_data))

    # ---- judging

    def _changes(self) -> Iterator[StragglerChange]:
        works_alike = all(_is_even(history) for history in self._histories)
        for rank, history in enumerate(self._histories):
            straggler = self.active.get(rank)
            if straggler is None:
                found = _slow_work(rank, history) or (_slow_link(rank, history) if works_alike else None)
                if found:
                    self.active[rank] = found
                    yield StragglerChange(found, began=True)
            elif _is_over(history, straggler.part):
                del self.active[rank]
                yield StragglerChange(straggler, began=False)


def peers_of(mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the groups of ranks that do the same work: those of a pipeline rank with the same part of sequences."""
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in range(mesh.world):
        pipeline_rank, column = mesh.coordinates(rank)
        groups.setdefault((pipeline_rank, column // mesh.tp % mesh.cp), []).append(rank)
    return [tuple(group) for group in groups.values()]


def _slow_work(rank: int, history: _RankHistory) -> Straggler | None:
    samples = [*history.samples]
    if (found := _find_excess([sample.slow for sample in samples])) is None:
        return None
    window, factor = samples[-found.size :], found.factor
    part: Part = "data" if 2 * sum(sample.data for sample in window) > len(window) else "compute"
    return Straggler(rank, part, factor, next(sample.step for sample in window if sample.slow > HALF))


def _slow_link(rank: int, history: _RankHistory) -> Straggler | None:
    samples = [*history.samples]
    for index, part in enumerate(LINK_PARTS):
        if found := _find_excess([sample.waits[index] for sample in samples]):
            since = next(sample.step for sample in samples[-found.size :] if sample.waits[index] > HALF)
            return Straggler(rank, part, found.factor, since)
    return None


class _Excess(NamedTuple):
    """An excess in the last `size` samples, as a factor."""

    size: int
    factor: float


def _find_excess(values: Sequence[float]) -> _Excess | None:
    """Return by which factor the last values are above the limit, with the shortest window that shows it."""
    for size in WINDOWS:
        last = values[-size:]
        if len(last) < size or sum(value > HALF for value in last) < AGREEING * size:
            return None  # longer windows are for noise, not for an older excess
        center = median(last)
        if center < LIMIT:
            continue
        spread = NORMAL_MAD * median(abs(value - center) for value in last)
        jumps = NORMAL_MAD / math.sqrt(2) * median(abs(after - before) for before, after in pairwise(values))
        sample_error = MEDIAN_ERROR * max(spread, jumps) / math.sqrt(size)
        blocks = [median_low(last[start : start + BLOCK]) for start in range(0, size, BLOCK)]
        block_error = stdev(blocks) / math.sqrt(len(blocks))
        excess = center - max(SAMPLE_ERRORS * sample_error, BLOCK_ERRORS * block_error)
        if excess >= LIMIT and min(blocks) > HALF:
            return _Excess(size, math.exp(center))
    return None


def _is_even(history: _RankHistory) -> bool:
    """Whether the rank, with its load of experts, works as long as its peers."""
    last = [abs(sample.raw) for sample in history.samples][-WINDOWS[0] :]
    return not last or median(last) < HALF


def _is_over(history: _RankHistory, part: Part) -> bool:
    last = [*history.samples][-WINDOWS[0] :]
    if part in LINK_PARTS:
        return median(sample.waits[LINK_PARTS.index(part)] for sample in last) < HALF
    return median(sample.slow for sample in last) < HALF


def _load(rows: float, rows_of_peers: float) -> float:
    """Return the logarithm of the ratio of rows of experts, 0 if the rank has fewer."""
    return math.log(max(1.0, rows / rows_of_peers)) if rows_of_peers > 0 else 0.0


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each of at least two values the median of the others."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranked, medians = [values[index] for index in order], [0.0] * len(values)
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2  # of the others
    for place, index in enumerate(order):
        medians[index] = (ranked[low + (low >= place)] + ranked[high + (high >= place)]) / 2
    return medians
