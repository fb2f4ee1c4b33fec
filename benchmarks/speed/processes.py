"""What a tree of processes uses: processor time and memory, read from outside. Linux only.

Processor time is that of every thread a process has had, in nanoseconds. Memory is what the tree would take if it were
alone on the machine: what a page of it costs is shared among its own processes only (their PSS), and a file that others
have mapped too, libtorch above all, counts in full, once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
SHARED_MEMORY = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV")  # counted as such, not as files
GONE = (ProcessLookupError, FileNotFoundError, PermissionError)  # it ended while we looked
STOPPED = ("T", "t", "Z", "X")
_RANGE = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")


def tree(root: int) -> tuple[int, ...]:
    """`root` and all that descend from it, in order of their number."""
    parents: dict[int, int] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with suppress(*GONE):
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return tuple(sorted(found))


def processor_s(pids: Iterable[int]) -> dict[int, float]:
    """Seconds of processor time of each process so far, all its threads together; one that has ended is absent."""
    used = {}
    for pid in pids:
        with suppress(OSError):
            used[pid] = time.clock_gettime(~pid << 3 | 2)  # the clock id of another process: clock_getcpuclockid(3)
    return used


def used_between(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Seconds of processor time between two readings; a process that began in between counts from its start."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def is_stopped(pid: int) -> bool:
    """Whether no thread of a process can run."""
    try:
        return all(_stat(pid, int(task.name))[0] in STOPPED for task in (PROC / str(pid) / "task").iterdir())
    except GONE:
        return True


def _stat(pid: int, task: int | None = None) -> list[str]:
    """State, parent and so on: what follows the name, which may hold anything."""
    path = PROC / str(pid) / "stat" if task is None else PROC / str(pid) / "task" / str(task) / "stat"
    return path.read_text("utf-8", "replace").rpartition(")")[2].split()


# ---------------------------------------------------------------- memory


def anonymous_bytes(pids: Iterable[int]) -> int:
    """What the processes hold that is in no file: heaps, stacks, shared memory. Quick enough to be sampled."""
    total = 0
    for pid in pids:
        with suppress(*GONE):
            rows = _fields((PROC / str(pid) / "smaps_rollup").read_text("ascii"))
            total += rows.get("Pss_Anon", 0) + rows.get("Pss_Shmem", 0)
    return total


def file_bytes(pids: Iterable[int]) -> int:
    """Pages of files that the processes have mapped, each part of a file once."""
    resident: dict[tuple[str, str], int] = {}
    for pid in pids:
        with suppress(*GONE):
            for part, size in file_parts((PROC / str(pid) / "smaps").read_text("utf-8", "replace")):
                resident[part] = max(resident.get(part, 0), size)
    return sum(resident.values())


def file_parts(smaps: str) -> list[tuple[tuple[str, str], int]]:
    """((file, offset), resident bytes) of each mapping of a file; pages that were written to are not the file's."""
    found: list[tuple[tuple[str, str], int]] = []
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
            found.append((part, size - _kilobytes(line)))
    return found


def _fields(text: str) -> dict[str, int]:
    return {line.split(":")[0]: _kilobytes(line) for line in text.splitlines() if line.endswith(" kB")}


def _kilobytes(line: str) -> int:
    return int(line.split()[-2]) * 1024
