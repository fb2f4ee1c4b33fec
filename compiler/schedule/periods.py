"""The makespan, idle time and activations of long schedules, exactly, without running every step.

In its steady state a schedule repeats a period. What the ranks will do follows from their state: when each rank is
free, the messages that wait for it, and the slots that it has still to run. If all times of a state are those of an
earlier one plus T, and every rank has run slots that it will run again k times in a row, then the next k periods are
copies of the last, each T later. So the run jumps over them: it adds k · T to all times, and goes on. The state is
compared as it is, so the result equals that of `simulate`, which runs every step.

Messages between two stages arrive in the order of micro-batches, so they wait in a queue without numbers. The first
state is kept after 1, 2, 4, … rounds (Brent's algorithm), as nothing says how long a period is.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from compiler.schedule.numbering import SlotRow, name_weights
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Prices
from compiler.schedule.slots import Slot, Token
from runtime.contract.actions import Action, Pair, Step

_Queue = deque[int]  # arrivals of messages for a stage, in ticks
_QueueKey = tuple[bool, int, int]  # whether they come from the stage before; the stage; the direction
_MOST_STEPS = 16  # of a rank in a round, so that a rank that waits for nothing does not run ahead of the others


@dataclass(frozen=True)
class Totals:
    """The times of a schedule without those of its steps; see `Timeline`."""

    makespan: Fraction
    idle: tuple[Fraction, ...]  # by rank
    peak_activations: tuple[Fraction, ...]  # by rank
    steps_run: int  # all others are copies of these


def time_by_periods(schedule: Schedule, prices: Prices) -> Totals | None:
    """The totals of a schedule that has backwards.

    Returns None if it is not made of slots, if micro-batches differ, or if ranks wait for each other for ever. Raises
    ValueError if the prices are for other sizes.
    """
    prices.check(schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches)
    rows = [row for row in schedule.actions if isinstance(row, SlotRow)]
    if len(rows) < len(schedule.actions) or prices.micro_batches:
        return None
    return _PipelineRun(schedule, rows, prices).run()


@dataclass(frozen=True)
class _SlotKind:
    """What a slot of a rank takes and makes, wherever it stands. Memory is in parts of an activation."""

    time: int
    takes: tuple[tuple[_Queue, int], ...]  # a queue, and how many of its messages
    sends: tuple[tuple[_Queue, int], ...]  # a queue, and the time of the message
    holds: int  # from its start
    frees: int  # at its end


class _RowRun:
    """A rank that runs its slots in order."""

    def __init__(self, row: Sequence[int], kinds: Sequence[_SlotKind]) -> None:
        self.row, self.kinds = row, kinds
        self.position = self.clock = self.busy = self.live = self.peak = 0

    def run(self) -> int:
        """Run until the rank waits, and at most `_MOST_STEPS`. Returns how many steps were run."""
        begin = self.position
        for number in self.row[begin : begin + _MOST_STEPS]:
            kind = self.kinds[number]
            for queue, count in kind.takes:
                if len(queue) < count:
                    return self.position - begin
            for queue, count in kind.takes:
                for _ in range(count):
                    self.clock = max(self.clock, queue.popleft())
            self.clock += kind.time
            self.busy += kind.time
            for queue, delay in kind.sends:
                queue.append(self.clock + delay)
            self.live += kind.holds
            self.peak = max(self.peak, self.live)
            self.live -= kind.frees
            self.position += 1
        return self.position - begin

    def repeats(self, begin: int) -> int | None:
        """How often the slots since `begin` follow once more, one after the other; None if there are none."""
        end = start = self.position
        length = end - begin
        if not length:
            return None
        period = self.row[begin:end]
        while self.row[end : end + length] == period:
            end += length
        return (end - start) // length

    def skip(self, mark: tuple[int, int, int], times: int, shift: int) -> None:
        """Go on as if the slots since a mark (position, busy, live) had run `times` more times."""
        position, busy, live = mark
        gain = self.live - live
        if gain > 0:  # the last of the skipped periods holds most
            for number in self.row[position : self.position]:
                kind = self.kinds[number]
                live += kind.holds
                self.peak = max(self.peak, live + times * gain)
                live -= kind.frees
        self.live += times * gain
        self.busy += times * (self.busy - busy)
        self.position += times * (self.position - position)
        self.clock += shift


@dataclass(frozen=True)
class _PipelineState:
    """All that decides what ranks do next, with times after `start`, and how far each rank is."""

    start: int
    clocks: list[int]
    arrivals: list[list[int]]
    marks: list[tuple[int, int, int]]  # by rank: position, busy, live


class _PipelineRun:
    """The ranks of a schedule, and the messages between them."""

    def __init__(self, schedule: Schedule, rows: Sequence[SlotRow], prices: Prices) -> None:
        self.schedule, self.prices, self.parts = schedule, prices, prices.keeps.denominator
        self.queues: defaultdict[_QueueKey, _Queue] = defaultdict(deque)
        slots = [name_weights(row.slots) for row in rows]
        distinct = [list(dict.fromkeys(of_rank)) for of_rank in slots]
        ranks = range(schedule.num_ranks)
        times = [[prices.step_time(_step(slot, rows[r]), r) for slot in distinct[r]] for r in ranks]
        messages = {Fraction(0), *(self._message(r, key) for r in ranks for key in self._sent(rows[r]))}
        denominators = {time.denominator for time in messages.union(*times)}
        self.unit = Fraction(1, math.lcm(*denominators))
        self.ranks: list[_RowRun] = []
        for r in ranks:
            numbers = {slot: number for number, slot in enumerate(distinct[r])}
            kinds = [self._kind(r, rows[r], slot, time) for slot, time in zip(distinct[r], times[r], strict=True)]
            self.ranks.append(_RowRun(array("L", [numbers[slot] for slot in slots[r]]), kinds))

    def run(self) -> Totals | None:
        """Run all slots, in rounds in which each rank has its turn. None if ranks wait for ever."""
        steps_run = rounds = 0
        earlier, keep_at = self._state(), 1  # the round after which the next state is kept
        while count := sum(rank.run() for rank in self.ranks):
            steps_run += count
            rounds += 1
            if self._skip(earlier):
                rounds = keep_at = 1
            if rounds == keep_at:
                earlier, keep_at = self._state(), 2 * keep_at
        if any(rank.position < len(rank.row) for rank in self.ranks):
            return None
        makespan = max(rank.clock for rank in self.ranks)
        return Totals(
            makespan * self.unit,
            tuple((makespan - rank.busy) * self.unit for rank in self.ranks),
            tuple(Fraction(rank.peak, self.parts) for rank in self.ranks),
            steps_run,
        )

    def _skip(self, earlier: _PipelineState) -> bool:
        """Jump over all periods that repeat what ran since an earlier state. Returns whether there were any."""
        start = self.ranks[0].clock
        if [rank.clock - start for rank in self.ranks] != earlier.clocks or self._arrivals(start) != earlier.arrivals:
            return False
        begins = [position for position, _, _ in earlier.marks]
        repeats = [rank.repeats(begin) for rank, begin in zip(self.ranks, begins, strict=True)]
        times = min(count for count in repeats if count is not None)  # one has run, or the round would be the last
        if not times:
            return False
        shift = times * (start - earlier.start)
        for rank, mark in zip(self.ranks, earlier.marks, strict=True):
            rank.skip(mark, times, shift)
        for queue in self.queues.values():
            later = [arrival + shift for arrival in queue]
            queue.clear()
            queue.extend(later)
        return True

    def _state(self) -> _PipelineState:
        start = self.ranks[0].clock
        clocks = [rank.clock - start for rank in self.ranks]
        marks = [(rank.position, rank.busy, rank.live) for rank in self.ranks]
        return _PipelineState(start, clocks, self._arrivals(start), marks)

    def _arrivals(self, start: int) -> list[list[int]]:
        return [[arrival - start for arrival in queue] for queue in self.queues.values()]

    def _kind(self, rank: int, row: SlotRow, slot: Slot, time: Fraction) -> _SlotKind:
        """A slot of a rank that takes a time."""
        takes = Counter(key for token in slot if (key := self._taken(row, token)))
        sends = [key for token in slot if (key := self._target(row, token))]
        w_parts = self.prices.keeps.numerator
        freed = {"F": 0, "B": self.parts, "I": self.parts - w_parts, "W": w_parts}
        return _SlotKind(
            int(time / self.unit),
            tuple((self.queues[key], count) for key, count in takes.items()),
            tuple((self.queues[key], int(self._message(rank, key) / self.unit)) for key in sends),
            self.parts * sum(kind == "F" for kind, _ in slot),
            sum(freed[kind] for kind, _ in slot),
        )

    def _taken(self, row: SlotRow, token: Token) -> _QueueKey | None:
        """The queue that an action waits for; None if it needs nothing from another stage."""
        kind, chunk = token
        stage, direction = row.homes[chunk]
        first = {"F": 0, "B": self.schedule.num_stages - 1, "I": self.schedule.num_stages - 1, "W": stage}[kind]
        return None if stage == first else (kind == "F", stage, direction)

    def _target(self, row: SlotRow, token: Token) -> _QueueKey | None:
        """The queue to which an action sends; None if no stage needs what it makes."""
        kind, chunk = token
        stage, direction = row.homes[chunk]
        target = stage + 1 if kind == "F" else stage - 1
        is_sent = kind != "W" and 0 <= target < self.schedule.num_stages
        return (kind == "F", target, direction) if is_sent else None

    def _sent(self, row: SlotRow) -> list[_QueueKey]:
        """The queues to which a rank sends."""
        tokens: list[Token] = [(kind, chunk) for chunk in range(len(row.homes)) for kind in ("F", "B")]
        return [key for token in tokens if (key := self._target(row, token))]

    def _message(self, source: int, key: _QueueKey) -> Fraction:
        """The time of a message to a queue; 0 from a rank to itself."""
        _, stage, direction = key
        target = self.schedule.rank_of(stage, direction * (self.schedule.num_micro_batches - 1))
        return self.prices.message(source, target) if source != target else Fraction(0)


def _step(slot: Slot, row: SlotRow) -> Step:
    """A step of a slot, on any micro-batch: all are alike."""
    actions = [Action(kind, row.homes[chunk][0], row.firsts[chunk]) for kind, chunk in slot]
    return Pair(*actions) if len(actions) == 2 else actions[0]
