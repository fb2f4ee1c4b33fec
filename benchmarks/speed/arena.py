"""The arena: contestants are separate processes that run one at a time, in turn: A/B/C/A/B/C.

A contestant prepares, warms up and reports that it is ready. From then on it is stopped (SIGSTOP) except during its
turns, so that it cannot disturb the others; the arena checks that it used no CPU time. Wall-clock time is measured
here, from the order to the reply; CPU time is that of all its processes. Peak memory is sampled in a separate step that
is not timed. If a contestant fails, its reason is recorded and the others go on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.speed.processes import anonymous_bytes, file_bytes, is_stopped, processor_s, tree, used_between
from benchmarks.speed.serve import die_with_parent

PREPARE_S, ROUND_S = 900.0, 300.0  # time limits
SAMPLE_S = 0.02
STOP_S = 5.0
IDLE_S = 0.02  # allowed CPU time during the turns of others, in total
LOG_LINES = 12


class FailedError(Exception):
    """Raised if a contestant cannot go on. The message is the reason."""


@dataclass(frozen=True)
class Contestant:
    """A command that serves orders (see serve.py), and the steps of a round."""

    name: str
    command: tuple[str, ...]
    steps: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """Wall-clock and CPU seconds of a round, for all processes of the contestant."""

    seconds: float
    processor_s: float


@dataclass
class Record:
    """The results of a contestant. `losses`: of its first steps; `failed`: why it did not finish, or ""."""

    steps: int
    info: dict[str, Any] = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    peak_bytes: int = 0
    idle_processor_s: float = 0.0
    failed: str = ""


def compete(
    contestants: Sequence[Contestant],
    rounds: int,
    folder: Path,
    say: Callable[[str], None] = lambda _: None,
    prepare_s: float = PREPARE_S,
    round_s: float = ROUND_S,
) -> dict[str, Record]:
    """Run all rounds of all contestants. Logs are written to `folder`. All processes have ended when this returns."""
    records = {c.name: Record(c.steps) for c in contestants}
    seats: dict[str, Seat] = {}
    folder.mkdir(parents=True, exist_ok=True)

    def attempt(name: str, phase: str, act: Callable[[], None]) -> None:
        say(f"{phase}: {name}")
        try:
            act()
        except FailedError as error:
            records[name].failed = f"{phase}: {error}"
            say(f"{name}: {records[name].failed}")
            if name in seats:
                seats.pop(name).end()

    try:
        for number, contestant in enumerate(contestants):
            seat = Seat(contestant, folder / f"{number}.log", records[contestant.name])
            seats[contestant.name] = seat
            attempt(contestant.name, "preparation", lambda seat=seat: seat.prepare(prepare_s))  # type: ignore[misc]
        for number in range(1, rounds + 1):
            for name, seat in list(seats.items()):
                attempt(name, f"round {number}", lambda seat=seat: seat.run(round_s))  # type: ignore[misc]
        for name, seat in list(seats.items()):
            attempt(name, "memory", lambda seat=seat: seat.weigh(round_s))  # type: ignore[misc]
    finally:
        for seat in seats.values():
            seat.end()
    return records


class Seat:
    """The processes of a contestant, and the two pipes to it."""

    def __init__(self, contestant: Contestant, log: Path, record: Record) -> None:
        self.contestant, self.log, self.record = contestant, log, record
        orders_read, self.orders = os.pipe2(os.O_CLOEXEC)
        self.replies, replies_write = os.pipe2(os.O_CLOEXEC)
        self.pending = b""
        with log.open("wb") as log_file:
            self.process = subprocess.Popen(
                [*contestant.command, "--wire", f"{orders_read},{replies_write}"],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                pass_fds=(orders_read, replies_write),
                env=os.environ | dict(contestant.environment),
                start_new_session=True,  # its own process group, which is stopped and continued as a whole
                preexec_fn=die_with_parent,
            )
        os.close(orders_read)
        os.close(replies_write)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.used: dict[int, float] = {}  # CPU seconds by process when it was stopped

    # ---- turns

    def prepare(self, limit_s: float) -> None:
        """Wait until the contestant is ready, then stop it."""
        reply = self._reply(limit_s)
        self.record.info, self.record.losses = reply["ready"], reply["losses"]
        self._stop()

    def run(self, limit_s: float) -> None:
        """Run a timed round."""
        before = self._go_on()
        start = time.perf_counter()
        self._order(self.contestant.steps)
        self._reply(limit_s)
        seconds = time.perf_counter() - start
        used = used_between(before, processor_s(tree(self.process.pid)))
        self._stop()
        self.record.rounds.append(Round(seconds, used))

    def weigh(self, limit_s: float) -> None:
        """Run a step and sample its memory."""
        peak, pids = 0, tree(self.process.pid)

        def sample() -> None:
            nonlocal peak
            peak = max(peak, anonymous_bytes(pids))

        self._go_on()
        self._order(1)
        self._reply(limit_s, sample)
        sample()
        self.record.peak_bytes = peak + file_bytes(pids)
        self._stop()

    def end(self) -> None:
        """Kill its remaining processes."""
        pids = tree(self.process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in pids:  # processes that left the group
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for descriptor in (self.orders, self.replies, self.pidfd):
            os.close(descriptor)

    # ---- stop and go

    def _stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)
        until = time.monotonic() + STOP_S
        while time.monotonic() < until and not all(map(is_stopped, tree(self.process.pid))):
            time.sleep(0.001)
        self.used = processor_s(tree(self.process.pid))

    def _go_on(self) -> dict[int, float]:
        """Check that it used no CPU time since it was stopped, and continue it. Returns CPU seconds by process."""
        used = processor_s(tree(self.process.pid))
        self.record.idle_processor_s += used_between(self.used, used)
        if self.record.idle_processor_s > IDLE_S:
            raise FailedError(f"used {self.record.idle_processor_s:.2f} s of CPU time during the turns of others")
        os.killpg(self.process.pid, signal.SIGCONT)
        return used

    def _order(self, steps: int) -> None:
        try:
            os.write(self.orders, f'{{"steps": {steps}}}\n'.encode())
        except BrokenPipeError:
            raise FailedError(self._end_of_it()) from None

    def _reply(self, limit_s: float, sample: Callable[[], None] | None = None) -> dict[str, Any]:
        """Wait for its next line. `sample` is called repeatedly meanwhile."""
        until = time.monotonic() + limit_s
        poll = select.poll()
        poll.register(self.replies, select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)
        while b"\n" not in self.pending:
            remaining_s = until - time.monotonic()
            if remaining_s <= 0:
                raise FailedError(f"sent nothing for {limit_s:g} s{self._last_lines()}")
            if sample:
                sample()
            ready = {descriptor for descriptor, _ in poll.poll(1000 * (SAMPLE_S if sample else remaining_s))}
            if self.replies in ready and (chunk := os.read(self.replies, 1 << 16)):
                self.pending += chunk
            elif ready:
                raise FailedError(self._end_of_it())
        line, _, self.pending = self.pending.partition(b"\n")
        return dict(json.loads(line))

    def _end_of_it(self) -> str:
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return f"closed its pipes{self._last_lines()}"
        cause = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f"ended with {cause}{self._last_lines()}"

    def _last_lines(self) -> str:
        lines: Iterable[str] = self.log.read_text("utf-8", "replace").rstrip().splitlines()[-LOG_LINES:]
        return "".join(f"\n    {line}" for line in lines)
