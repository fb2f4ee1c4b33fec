"""Watching forked ranks: ranks that died, ranks that hang and where, and signals.

The supervisor sleeps in a poll over the process descriptors of the ranks and its own signals, without a busy loop.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from runtime.contract.options import START_TIMEOUT_S
from runtime.launch.heartbeat import Board
from runtime.launch.rank_process import FINISH, LEAVE_S, STACK_SIGNAL, STOP_SIGNALS
from runtime.system.outcome import Outcome, Waiting, death_text, oom_kills_so_far

POLL_S = 0.1
SETTLE_S = 0.25  # wait after a broken connection for the death that caused it (peers notice one in 12-55 ms)
REPEAT_S = 0.5  # signals closer together count as one: `timeout` signals its child, then the group
STACK_S = 0.2  # for hanging ranks to write their stacks

_STOPPED = ("stopped", "stopped by a debugger")
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": _STOPPED[0], "t": _STOPPED[1]}
_TOP_FRAME = re.compile(r"\(most recent call first\):\n  File \"([^\"\n]*)\", line (\d+) in (\S+)")


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A forked rank. `pidfd` becomes readable when it ends."""

    rank: int
    pid: int
    pidfd: int
    log: Path


@dataclass(frozen=True, slots=True)
class Death:
    """A rank that died, with the time and the reason as far as known. `slowdown`: as in ReportedError."""

    process: RankProcess
    time_ns: int
    lost_peer: bool
    reason: str
    detail: str = ""
    slowdown: float = 0.0


@dataclass(frozen=True, slots=True)
class _RankFrame:
    """Position of a rank: `file.py:12 in function`, and whether that is communication code (ours or torch's)."""

    text: str
    waits_for_peer: bool


class ReceivedSignal(NamedTuple):
    number: int
    time_s: float  # of the monotonic clock


@dataclass
class Interrupts:
    """Collects SIGINT and SIGTERM to the supervisor with their times; they wake its poll."""

    received: list[ReceivedSignal] = field(default_factory=list)
    wake: int = -1  # readable after a signal

    def __enter__(self) -> Interrupts:
        self.wake, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handlers = [(s, signal.signal(s, self._receive)) for s in STOP_SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers:
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.wake)
        os.close(self._write)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(ReceivedSignal(number, time.monotonic()))

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self.wake, 64):
                pass

    def repeated_signal(self) -> int:
        """Return the signal that arrived a second time, or 0."""
        return next((s for s, arrived_s in self.received if arrived_s - self.received[0].time_s > REPEAT_S), 0)


@dataclass(frozen=True, slots=True)
class Supervision:
    """Settings of a supervisor. `on_poll` is called about every 0.1 s and once at the end; it must be quick.

    `hang_timeout_s`: how long all boards may stay unchanged (None: forever). `start_timeout_s`: how long ranks wait for
    each other at the start.
    """

    on_poll: Callable[[Board], None] | None = None
    hang_timeout_s: float | None = 300.0
    start_timeout_s: float = START_TIMEOUT_S

    def poll(self, board: Board) -> None:
        """Call `on_poll`, if there is one."""
        if self.on_poll:
            self.on_poll(board)

    def watch(self, processes: Sequence[RankProcess], board: Board, interrupts: Interrupts, oom_kills: int) -> Outcome:
        """Watch until all ranks have finished, one has failed, all hang, or a signal arrived twice.

        Ranks that have finished, but still leave after LEAVE_S, have finished: nothing of the run is lost.
        """
        alive = {p.pidfd: p for p in processes}
        poll = select.poll()
        for descriptor in (*alive, interrupts.wake):
            poll.register(descriptor, select.POLLIN)
        stillness, stay = Stillness(time.monotonic()), list[int]()
        leave_s = min(LEAVE_S, self.hang_timeout_s or LEAVE_S)
        while alive:
            if deaths := _collect(poll, POLL_S, alive, board, oom_kills):
                return _failure(deaths, poll, alive, board, oom_kills)
            interrupts.drain()
            self.poll(board)
            if number := interrupts.repeated_signal():
                return Outcome("killed", f"{signal.Signals(number).name} came a second time", signal=number)
            if interrupts.received:
                board.request_stop(interrupts.received[0].number)
            still_s = stillness.seconds(time.monotonic(), tuple(board.read(p.rank).since_ns for p in alive.values()))
            if alive and still_s >= leave_s and all(board.read(p.rank).action == FINISH for p in alive.values()):
                stay = sorted(p.rank for p in alive.values())
                break  # the caller kills them
            if alive and self.hang_timeout_s is not None and still_s >= self.hang_timeout_s:
                return _outcome_of_hang(list(alive.values()), board, still_s)
        if stay:
            ranks = f"rank{'s' * (len(stay) > 1)} {', '.join(map(str, stay))}"
            print(f"warning: {ranks} had finished, but did not end in {leave_s:g} s: killed", file=sys.stderr)
        request = board.stop_request()
        if request is None:
            return Outcome("finished")
        receiver = "the supervisor" if request.rank < 0 else f"rank {request.rank}"
        return Outcome("stopped", f"{receiver} received {signal.Signals(request.signal).name}", signal=request.signal)


@dataclass
class Stillness:
    """Time for which no board has changed. Time in which this process was suspended does not count."""

    checked: float
    stamps: tuple[int, ...] = ()
    still_s: float = 0.0

    def seconds(self, now_s: float, stamps: tuple[int, ...]) -> float:
        """Return for how many seconds the stamps have not changed."""
        self.still_s += min(now_s - self.checked, 2 * POLL_S)
        if stamps != self.stamps:
            self.stamps, self.still_s = stamps, 0.0
        self.checked = now_s
        return self.still_s


def _collect(
    poll: select.poll, wait_s: float, alive: dict[int, RankProcess], board: Board, oom_kills: int
) -> list[Death]:
    """Wait for an event. Remove ended ranks from `alive`, and return those that had not finished."""
    deaths = []
    for descriptor, _ in poll.poll(wait_s * 1000):
        process = alive.get(descriptor)
        if process is None:
            continue
        end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG)
        assert end is not None, f"rank {process.rank} has ended, yet cannot be collected"
        poll.unregister(descriptor)
        del alive[descriptor]
        if not board.has_finished(process.rank):
            deaths.append(_death(process, board, end, oom_kills))
    return deaths


def _death(process: RankProcess, board: Board, end: os.waitid_result, oom_kills: int) -> Death:
    failure = board.failure(process.rank)
    if failure is not None:
        return _death_by_exception(process, board)
    if end.si_code == os.CLD_EXITED:
        return Death(process, time.monotonic_ns(), False, f"left with exit code {end.si_status} before its end")
    reason = death_text(end.si_status, out_of_memory=oom_kills_so_far() > oom_kills)
    # SIGKILL comes from outside, never from a peer's failure: among simultaneous deaths it came first.
    time_ns = board.read(process.rank).since_ns if end.si_status == signal.SIGKILL else time.monotonic_ns()
    return Death(process, time_ns, False, reason)


def _death_by_exception(process: RankProcess, board: Board) -> Death:
    failure = board.failure(process.rank)
    assert failure is not None
    return Death(process, failure.time_ns, failure.lost_peer, failure.summary, failure.detail, failure.slowdown)


def _failure(
    deaths: list[Death], poll: select.poll, alive: dict[int, RankProcess], board: Board, oom_kills: int
) -> Outcome:
    """Return the cause: the first death by time, except that lost connections count only if there is no other."""
    until = time.monotonic() + SETTLE_S
    while alive and all(d.lost_peer for d in deaths) and (remaining_s := until - time.monotonic()) > 0:
        deaths += _collect(poll, remaining_s, alive, board, oom_kills)
    deaths += [
        _death_by_exception(p, board) for p in alive.values() if board.failure(p.rank)
    ]  # still writing tracebacks
    stopped = next((p for p in alive.values() if process_state(p.pid) in _STOPPED), None)
    if stopped is not None and all(d.lost_peer for d in deaths):
        return _outcome_of_stopped_rank(stopped, [*(d.process for d in deaths), *alive.values()], board)
    cause = min(deaths, key=lambda d: (d.lost_peer, d.time_ns))
    beat = board.read(cause.process.rank)
    place = (cause.process.rank, beat.step, beat.action, cause.process.log)
    return Outcome("failed", cause.reason, *place, detail=cause.detail, slowdown=cause.slowdown)


def _outcome_of_stopped_rank(stopped: RankProcess, processes: Sequence[RankProcess], board: Board) -> Outcome:
    """Return the outcome when ranks gave up waiting for a stopped one."""
    now_ns, beat = time.monotonic_ns(), board.read(stopped.rank)
    peers = sorted({p.rank: p for p in processes if p is not stopped}.items())
    waiting = tuple(
        Waiting(rank, b.step, b.action, (now_ns - b.since_ns) / 1e9, _state(p), "")
        for rank, p in peers
        for b in [board.read(rank)]
    )
    reason = f"its process is {process_state(stopped.pid)}, and the other ranks no longer wait for it"
    return Outcome("hung", reason, stopped.rank, beat.step, beat.action, stopped.log, waiting=waiting)


def _state(process: RankProcess) -> str:
    try:
        return process_state(process.pid)
    except OSError:  # it has ended, and was reaped
        return "ended"


def _outcome_of_hang(alive: Sequence[RankProcess], board: Board, still_s: float) -> Outcome:
    """Blame the rank that is stopped, else one outside communication, else the longest waiting. List all actions."""
    sizes = {p.rank: p.log.stat().st_size if p.log.exists() else 0 for p in alive}
    states = {p.rank: process_state(p.pid) for p in alive}
    for process in alive:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.pidfd, STACK_SIGNAL)
    time.sleep(STACK_S)
    frames = {p.rank: _top_frame(p.log, sizes[p.rank]) for p in alive}
    now_ns = time.monotonic_ns()

    def suspicion(process: RankProcess) -> tuple[bool, bool, int]:
        rank = process.rank
        return states[rank] not in _STOPPED, frames[rank].waits_for_peer, board.read(rank).since_ns

    cause = min(alive, key=suspicion)
    beat = board.read(cause.rank)
    runs, waits, _ = suspicion(cause)
    why = "all wait for one another, this rank the longest" if waits else "it waits for no other rank"
    if not runs:
        why = f"its process is {states[cause.rank]}"
    waiting = tuple(
        Waiting(p.rank, b.step, b.action, (now_ns - b.since_ns) / 1e9, states[p.rank], frames[p.rank].text)
        for p in alive
        for b in [board.read(p.rank)]
    )
    reason = f"no rank has changed its action for {still_s:.1f} s; {why}"
    return Outcome("hung", reason, cause.rank, beat.step, beat.action, cause.log, waiting=waiting)


def process_state(pid: int) -> str:
    """Return the state of a process from /proc, in words."""
    letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return _STATES.get(letter, letter)


def _top_frame(log: Path, start: int) -> _RankFrame:
    """Return the innermost frame of the stack that a rank wrote into its log from byte `start` on."""
    text = ""
    with suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(start)
        text = file.read(1 << 16).decode(errors="replace")
    match = _TOP_FRAME.search(text)
    if match is None:
        return _RankFrame("", False)
    path = Path(match[1])
    return _RankFrame(f"{path.name}:{match[2]} in {match[3]}", is_communication(path))


def is_communication(path: Path) -> bool:
    """Whether a source file is communication code, ours or torch's."""
    return "/torch/distributed/" in str(path) or path.parent.name == "comm"
