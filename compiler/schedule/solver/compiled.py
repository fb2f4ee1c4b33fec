"""The annealing of rows in C (walk.c), which finds the same slots as the one in Python, in a thirtieth of the time.

Without a C compiler, it runs in Python.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from ctypes import CDLL, POINTER, Array, Structure, byref, c_char_p, c_double, c_int64, c_uint32
from pathlib import Path
from random import Random

from compiler.files import native
from compiler.schedule.solver.problem import ScheduleProblem, Slots
from compiler.schedule.solver.timing import FIXED, gap_of

SOURCE = Path(__file__).with_name("walk.c")
LOW_BITS = 62  # of a value, which may need more than 64
NO_MAKESPAN, NO_MEMORY = -1, -2


class _FlatProblem(Structure):
    """`Problem` of walk.c."""

    _fields_ = (
        *((name, c_int64) for name in ("num_rows", "num_chunks", "count", "num_events", "parts", "w_parts")),
        *((name, c_int64) for name in ("has_equal_w", "gap", "room")),
        *((name, POINTER(c_int64)) for name in ("caps", "counts", "needs", "makes", "delay", "times")),
        ("offered", c_char_p),
    )


def anneal(
    problem: ScheduleProblem, slots: Slots, work: float, temperature: float, cooling: float, seed: int, goal: int
) -> tuple[int, int, Slots] | None:
    """The makespan, the value and the slots of `anneal` in moves.py; None if it cannot run in C.

    temperature: at the start, of the value. cooling: of its logarithm, for each microsecond of work.
    """
    library = loaded()
    flat = _flat_problem(problem) if library else None
    if library is None or flat is None:
        return None
    words = (c_uint32 * native.WORDS)(*Random(seed).getstate()[1])
    numbers, sizes = _flat_slots(slots, flat.room)
    best = (c_int64 * 3)()
    failed = library.anneal(
        byref(flat),
        words,
        c_double(work),
        c_double(temperature),
        c_double(cooling),
        c_int64(goal),
        numbers,
        sizes,
        best,
    )
    if failed:
        return None
    found = tuple(tuple(numbers[row * flat.room : row * flat.room + size]) for row, size in enumerate(sizes))
    return best[0], (best[1] << LOW_BITS) + best[2], found


def makespan_of(problem: ScheduleProblem, slots: Slots) -> int | None:
    """The makespan of slots, `NO_MAKESPAN` if they have none; None if it cannot be computed in C."""
    library = loaded()
    flat = _flat_problem(problem) if library else None
    if library is None or flat is None or any(len(row) > flat.room for row in slots):
        return None
    makespan: int = library.makespan(byref(flat), *_flat_slots(slots, flat.room))
    return None if makespan == NO_MEMORY else makespan


def loaded() -> CDLL | None:
    """The library; None if it cannot be compiled or loaded."""
    library = native.loaded(SOURCE)
    if library is not None:
        library.makespan.restype = c_int64
    return library


def _flat_problem(problem: ScheduleProblem) -> _FlatProblem | None:
    """The problem as C reads it; None if its times are too long."""
    room = max(3 * sum(counts) for counts in problem.counts) + 1
    longest = max(max(table.values()) for table in problem.times)
    if longest * room * problem.num_rows + sum(problem.delay) >= 1 << LOW_BITS:
        return None
    times, offered = array("q", bytes(8 * FIXED * problem.num_rows)), bytearray(FIXED * problem.num_rows)
    for row, (table, slots) in enumerate(zip(problem.times, problem.offered, strict=True)):
        for slot, time in table.items():
            times[row * FIXED + slot] = time
        for slot in slots:
            offered[row * FIXED + slot] = 1
    return _FlatProblem(
        problem.num_rows,
        problem.num_chunks,
        problem.count,
        problem.num_events,
        problem.activation_parts,
        problem.w_parts,
        problem.has_equal_w,
        gap_of(problem),
        room,
        _numbers(problem.caps),
        _flattened(problem.counts),
        _flattened(problem.needs),
        _flattened(problem.makes),
        _numbers(problem.delay),
        (c_int64 * len(times)).from_buffer(times),
        bytes(offered),
    )


def _flat_slots(slots: Slots, room: int) -> tuple[Array[c_int64], Array[c_int64]]:
    """The slots as [row][room], and the number of slots of each row."""
    numbers = (c_int64 * (len(slots) * room))()
    for row, row_slots in enumerate(slots):
        numbers[row * room : row * room + len(row_slots)] = list(row_slots)
    return numbers, (c_int64 * len(slots))(*map(len, slots))


def _flattened(rows: Iterable[Iterable[int]]) -> object:
    return _numbers([number for row in rows for number in row])


def _numbers(values: Sequence[int]) -> object:
    return (c_int64 * len(values))(*values)
