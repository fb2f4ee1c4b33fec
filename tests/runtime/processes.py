"""Processes for the tests of launching: forked supervisors, and facts of processes and sockets from /proc."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.progress import Watch

TESTS = os.getpid()  # the process that runs tests, also in its forks
SHORT_S, LONG_S = 0.002, 0.05  # between two polls, at first and later: an endless wait must not look like work


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds. Raises HangError if the tests and all processes they started make no progress."""
    watch, looked, pause_s = None, time.monotonic(), SHORT_S
    while not condition():
        if time.monotonic() - looked > 1.0:
            watch, pause_s = watch or Watch(TESTS), LONG_S
            watch.look(what=f"while waiting for {what}")
            looked = time.monotonic()
        time.sleep(pause_s)


def block() -> NoReturn:
    """Wait forever, whatever signals are handled."""
    while True:
        signal.pause()


def state(pid: int) -> str:
    """The state of a process, R, S, T, Z, …, or "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def started(pid: int) -> int:
    """The start time of a process in clock ticks since boot, or 0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def polls(pid: int) -> int:
    """How many times a process has waited."""
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or only a zombie without other threads that its parent has yet to wait for."""
    try:
        return state(pid) in ("", "Z") and len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1
    except FileNotFoundError:
        return True


def listeners(pid: int) -> list[str]:
    """Hosts, as /proc/net writes them, on which the TCP sockets of a process listen."""
    return sorted(address.partition(":")[0] for address in listening(pid))


def listening(pid: int | None = None) -> set[str]:
    """Addresses, host:port as /proc/net writes them, on which a process listens on TCP. None: any process."""
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    files = None if pid is None else open_files(pid)
    return {row[1] for row in rows if row[3] == "0A" and (files is None or f"socket:[{row[9]}]" in files)}


def open_files(pid: int) -> set[str]:
    """The targets of a process's file descriptors."""
    targets = set()
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                targets.add(str(link.readlink()))
    return targets


@dataclass(frozen=True)
class Fork:
    """A process forked by a test."""

    pid: int

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def exit_code(self) -> int:
        """Wait for it. Returns its exit code, or minus the signal that killed it."""
        ended: list[int] = []

        def collect() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            ended.append(status)
            return pid != 0

        wait_for(collect, f"the end of process {self.pid}")
        return os.waitstatus_to_exitcode(ended[-1])


@contextmanager
def forked(run: Callable[[], int]) -> Iterator[Fork]:
    """Run `run` in a forked process, whose exit code is its result."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = run()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        yield Fork(pid)
    finally:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
