"""Limits against hangs, by progress: a process that works is never too slow, however busy the machine is.

A hang means that for PATIENCE_S nothing was printed and all processes together used less than WORK_S of CPU time. A
process that waits and polls uses less; one that works uses more, if it gets a tenth of a core.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

PATIENCE_S = 120.0
WORK_S = 6.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class HangError(Exception):
    """A process makes no progress."""


class Watch:
    """The progress of a process and its descendants, or of only the descendants."""

    def __init__(self, pid: int, patience_s: float = PATIENCE_S, work_s: float = WORK_S, itself: bool = True) -> None:
        self.pid, self.patience_s, self.work_s, self.itself = pid, patience_s, work_s, itself
        self._mark = (0, processor_s(pid, itself))
        self._since = time.monotonic()

    def look(self, printed_bytes: int = 0, what: str = "") -> None:
        """Raise HangError if there was no progress for too long. Call it about once a second."""
        checked_s, worked_s = time.monotonic(), processor_s(self.pid, self.itself)
        # The time of a descendant that ended before its parent waited for it is lost, so the sum may shrink.
        if printed_bytes != self._mark[0] or abs(worked_s - self._mark[1]) >= self.work_s:
            self._mark, self._since = (printed_bytes, worked_s), checked_s
        elif checked_s - self._since > self.patience_s:
            reason = f"nothing printed and less than {self.work_s:g} s of work in {self.patience_s:g} s"
            raise HangError(f"{reason} {what}".strip())


def processor_s(pid: int, itself: bool = True) -> float:
    """CPU seconds of a process and its descendants, including those that have ended."""
    family = [pid]
    for member in family:
        family += children(member)
    return sum(_ticks(member) for member in family[0 if itself else 1 :]) * TICK_S


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, zombies included."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid:
                pids.append(int(entry.name))
    return pids


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(map(int, fields[11:15]))  # utime, stime, and those of reaped children


def run(
    command: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    patience_s: float = PATIENCE_S,
    work_s: float = WORK_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. If it hangs, it is killed with all its descendants, and HangError has its output."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

        def printed(file: object) -> str:
            return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode("utf-8", "replace")

        def printed_bytes() -> int:
            return sum(os.fstat(file.fileno()).st_size for file in (out, err))

        with subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=err) as process:
            try:
                end(process, printed_bytes, patience_s, work_s)
            except HangError as error:
                kill(process.pid)
                raise HangError(f"{error}: {' '.join(command)}\n{printed(out)}{printed(err)}") from None
        return subprocess.CompletedProcess(command, process.returncode, printed(out), printed(err))


class Process(Protocol):
    """A process that was started. `wait` returns its exit code, or raises subprocess.TimeoutExpired."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float, /) -> int: ...


def end(
    process: Process,
    printed_bytes: Callable[[], int] = lambda: 0,
    patience_s: float = PATIENCE_S,
    work_s: float = WORK_S,
) -> int:
    """Wait for the end of a process. Returns its exit code. Raises HangError if it makes no progress."""
    watch = Watch(process.pid, patience_s, work_s)
    while True:
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            watch.look(printed_bytes())


def kill(pid: int) -> None:
    """Kill a process and its descendants, children first: orphans would not be found."""
    for child in children(pid):
        kill(child)
    os.kill(pid, signal.SIGKILL)
