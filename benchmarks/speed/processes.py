"""CPU time and memory of a process tree, measured from outside. Linux only.

CPU time is that of all threads that a process has had, with nanosecond resolution. Memory is what the tree would use if
it were alone on the machine: anonymous and shared memory by PSS, and mapped files, such as libtorch, in full but only
once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
SHARED_MEMORY = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV")  # counted as shared memory, not as files
GONE = (ProcessLookupError, FileNotFoundError, PermissionError)  # raised if a process ends meanwhile
STOPPED = ("T", "t", "Z", "X")
_RANGE = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")


def tree(root: int) -> tuple[int, ...]:
    """`root` and all its descendants, by ascending PID."""
    parents: dict[int, int] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with suppress(*GONE):
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    pids = {root}
    while children := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= children
    return tuple(sorted(pids))


def processor_s(pids: Iterable[int]) -> dict[int, float]:
    """CPU seconds of each process so far, over all its threads. Ended processes are left out."""
    used = {}
    for pid in pids:
        with suppress(OSError):
            used[pid] = time.clock_gettime(~pid << 3 | 2)  # the clock id of another process: clock_getcpuclockid(3)
    return used


def used_between(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """CPU seconds between two readings. A process that started in between counts from its start."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped or have ended."""
    try:
        return all(_stat(pid, int(task.name))[0] in STOPPED for task in (PROC / str(pid) / "task").iterdir())
    except GONE:
        return True


def _stat(pid: int, task: int | None = None) -> list[str]:
    """The fields of `stat` after the name, which may contain any characters: state, parent, …"""
    path = PROC / str(pid) / "stat" if task is None else PROC / str(pid) / "task" / str(task) / "stat"
    return path.read_text("utf-8", "replace").rpartition(")")[2].split()


# ---------------------------------------------------------------- memory


def anonymous_bytes(pids: Iterable[int]) -> int:
    """Memory that is not backed by files: heaps, stacks, shared memory. Fast enough for sampling."""
    total = 0
    for pid in pids:
        with suppress(*GONE):
            rows = _fields((PROC / str(pid) / "smaps_rollup").read_text("ascii"))
            total += rows.get("Pss_Anon", 0) + rows.get("Pss_Shmem", 0)
    return total


def file_bytes(pids: Iterable[int]) -> int:
    """Resident pages of files that the processes have mapped, each part of a file counted once."""
    resident: dict[tuple[str, str], int] = {}
    for pid in pids:
        with suppress(*GONE):
            for part, size in file_parts((PROC / str(pid) / "smaps").read_text("utf-8", "replace")):
                resident[part] = max(resident.get(part, 0), size)
    return sum(resident.values())


def file_parts(smaps: str) -> list[tuple[tuple[str, str], int]]:
    """((file, offset), resident bytes) of each mapping of a file, without pages that were written to."""
    parts: list[tuple[tuple[str, str], int]] = []
    part: tuple[str, str] | None = None
    size = 0
    for line in smaps.splitlines():
        if _RANGE.match(line):
            words = line.split(maxsplit=5)
            path = words[5] if len(words) == 6 else ""
            is_file = path.startswith("/") and not path.startswith(SHARED_MEMORY)
            part = (path, words[2]) if is_file else None
        elif part and line.startswith("Rss:"):
            size = _kilobytes(line)
        elif part and line.startswith("Anonymous:"):
            parts.append((part, size - _kilobytes(line)))
    return parts


def _fields(text: str) -> dict[str, int]:
    return {line.split(":")[0]: _kilobytes(line) for line in text.splitlines() if line.endswith(" kB")}


def _kilobytes(line: str) -> int:
    return int(line.split()[-2]) * 1024
