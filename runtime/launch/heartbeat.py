"""The board: the current action of every rank, in shared memory that outlives the rank, to name it in failures.

One page per rank in an anonymous mapping made before the fork. A rank writes its entry into the spare one of two
places and then flips one byte, so a reader sees a whole entry even if the writer was killed between two instructions.

Measured on a shared 2-core x86 machine under Python 3.11: `set_action` takes 0.30 µs.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

_PAGE = 4096
_ENTRY = struct.Struct("@qq112s")  # step, CLOCK_MONOTONIC in ns, action; two entries from byte 8 on
_ENTRIES = 8
_FINISHED = 1  # byte 0: index of the valid entry; byte 1: whether the rank has finished
_FAILURE = _ENTRIES + 2 * _ENTRY.size
_FAILED = struct.Struct("@qd?H")  # CLOCK_MONOTONIC in ns (0: none), slowdown, lost a peer, bytes of text after it
_TEXT = _FAILURE + _FAILED.size
_NOTICES = _PAGE - 1024
_TEXT_BYTES = _NOTICES - _TEXT
_COUNT = struct.Struct("@qH")  # number of messages, bytes of text after it: the last messages, one per line
_NOTICES_BYTES = _PAGE - _NOTICES - _COUNT.size
_SUMMARY_BYTES = 1000

_STOP = struct.Struct("@ii")  # page `world`: signal (0: none), rank that received it (-1: the supervisor)
_LAST = struct.Struct("@q")  # the step to end after (0: undecided); separate because only rank 0 writes it


@dataclass(frozen=True, slots=True)
class RankBeat:
    """A rank's last entry: its step, its action (`B3.7`), and the start of the action in ns of CLOCK_MONOTONIC."""

    step: int
    action: str
    since_ns: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception of a failed rank. `lost_peer`: a connection broke, so the cause may be another rank. `slowdown`: as
    in ReportedError."""

    time_ns: int
    slowdown: float
    lost_peer: bool
    summary: str  # type and message, the first line of it
    detail: str  # the last lines of the traceback


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to stop the run: the signal, and the rank that received it (-1: the supervisor)."""

    signal: int
    rank: int


def size_bytes(world: int) -> int:
    """Return the bytes of a board."""
    return (world + 1) * _PAGE


class Board:
    """Shared memory of `world` entries. A rank writes through `bind(rank)`; the supervisor reads."""

    __slots__ = ("_base", "_memory", "_spare", "rank", "step", "world")

    def __init__(self, world: int, *, _memory: mmap.mmap | None = None, _rank: int = -1) -> None:
        self.world = world
        self.rank = _rank  # -1: read-only
        self.step = 0
        self._memory = mmap.mmap(-1, size_bytes(world)) if _memory is None else _memory
        self._base = _rank * _PAGE
        self._spare = 1 - self._memory[self._base] if _rank >= 0 else 1

    def bind(self, rank: int) -> Board:
        """Return a board on the same memory that writes as `rank`."""
        assert 0 <= rank < self.world, f"rank {rank} of {self.world}"
        return Board(self.world, _memory=self._memory, _rank=rank)

    # -------------------------------------------------------- written by a rank

    def set_action(self, text: str) -> None:
        """Set the action that this rank starts, in at most 112 bytes: `B3.7`, `dispatch F3.0@L17`, `optimizer`."""
        spare = self._spare
        start = self._base + _ENTRIES + spare * _ENTRY.size
        _ENTRY.pack_into(self._memory, start, self.step, time.monotonic_ns(), text.encode())
        self._memory[self._base] = spare
        self._spare = 1 - spare

    def start_step(self, step: int) -> None:
        """Set the step that this rank starts. Later actions belong to it."""
        self.step = step
        self.set_action("start of step")

    def finish(self) -> None:
        """Mark this rank as finished. Exit code 0 is a success only after this."""
        self._memory[self._base + _FINISHED] = 1

    def fail(self, summary: str, detail: str, *, lost_peer: bool, slowdown: float = 0.0) -> None:
        """Record an exception. A long `detail` keeps its end, where a traceback names the error."""
        head = summary.partition("\n")[0].encode(errors="replace")[:_SUMMARY_BYTES] + b"\n"
        data = head + detail.encode(errors="replace")[-(_TEXT_BYTES - len(head)) :]
        start = self._base + _TEXT
        self._memory[start : start + len(data)] = data
        _FAILED.pack_into(self._memory, self._base + _FAILURE, time.monotonic_ns(), slowdown, lost_peer, len(data))

    def say(self, text: str) -> None:
        """Write a one-line message for the user, which the supervisor shows."""
        place = self._base + _NOTICES
        count, size = _COUNT.unpack_from(self._memory, place)
        start = place + _COUNT.size
        line = text.replace("\n", " ").encode(errors="replace")[: _NOTICES_BYTES - 2] + b"\n"
        data = bytes(self._memory[start : start + size]) + line
        if len(data) > _NOTICES_BYTES:
            data = data[-_NOTICES_BYTES:].partition(b"\n")[2]
        self._memory[start : start + len(data)] = data
        _COUNT.pack_into(self._memory, place, count + 1, len(data))

    def should_stop(self, step: int) -> bool:
        """Whether to end after `step`. Every rank calls this once at the end of every step.

        Ranks notice a request at different times, but must end after the same step. So rank 0 alone decides, one step
        ahead: at the end of step s it writes s + 1. Each step has a collective of all ranks, so every rank reads the
        decision at the end of s + 1.
        """
        place = self.world * _PAGE + _STOP.size
        (last,) = _LAST.unpack_from(self._memory, place)
        if not last and self.rank == 0 and self.stop_request():
            last = step + 1
            _LAST.pack_into(self._memory, place, last)
        return bool(last) and step >= last

    # -------------------------------------------------------- written by anyone

    def request_stop(self, signal: int, received_by: int | None = None) -> None:
        """Ask all ranks to end after one of the next steps. Only the first request counts.

        `received_by`: the rank that received the signal; this board's if None.
        """
        if self.stop_request() is None:
            rank = self.rank if received_by is None else received_by
            _STOP.pack_into(self._memory, self.world * _PAGE, signal, rank)

    def stop_request(self) -> StopRequest | None:
        """Return the request to stop after a step; None if there is none."""
        signal, rank = _STOP.unpack_from(self._memory, self.world * _PAGE)
        return StopRequest(signal, rank) if signal else None

    # -------------------------------------------------------- read by the supervisor

    def read(self, rank: int) -> RankBeat:
        """Return what a rank is doing, and since when."""
        base = rank * _PAGE
        step, since_ns, action = _ENTRY.unpack_from(self._memory, base + _ENTRIES + self._memory[base] * _ENTRY.size)
        return RankBeat(step, action.rstrip(b"\0").decode(errors="replace"), since_ns)

    def has_finished(self, rank: int) -> bool:
        """Whether a rank has reported that it ended normally."""
        return self._memory[rank * _PAGE + _FINISHED] == 1

    def messages(self, rank: int, num_read: int = 0) -> tuple[int, tuple[str, ...]]:
        """Return the number of a rank's messages, and those after the first `num_read`. Only the last 1,000 bytes are
        kept."""
        place = rank * _PAGE + _NOTICES
        count, size = _COUNT.unpack_from(self._memory, place)
        start = place + _COUNT.size
        lines = self._memory[start : start + size].decode(errors="replace").split("\n")[:-1]
        if _COUNT.unpack_from(self._memory, place)[0] != count:  # a message is being written
            return num_read, ()
        return count, tuple(lines[max(0, len(lines) - (count - num_read)) :]) if count > num_read else ()

    def failure(self, rank: int) -> Failure | None:
        """Return the exception that a rank recorded, or None."""
        time_ns, slowdown, lost_peer, size = _FAILED.unpack_from(self._memory, rank * _PAGE + _FAILURE)
        start = rank * _PAGE + _TEXT
        summary, _, detail = self._memory[start : start + size].decode(errors="replace").partition("\n")
        return Failure(time_ns, slowdown, lost_peer, summary, detail) if time_ns else None
