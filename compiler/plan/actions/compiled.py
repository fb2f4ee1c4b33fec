"""Annealing in C (annealing.c), which gives the same orders as the one in Python, in a twentieth of the time.

Without a C compiler, orders are searched in Python.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, byref, c_char_p, c_double, c_int64, c_uint32
from pathlib import Path
from random import Random
from typing import NamedTuple

from compiler.files import native
from compiler.plan.actions.lanes import Jobs

SOURCE = Path(__file__).with_name("annealing.c")
EXACT = 1 << 53  # integers below it are exact as doubles


class Cooling(NamedTuple):
    """How an annealing cools."""

    steps: int
    heat: float  # before the first step
    factor: float  # the heat of a step over that of the one before
    least: int  # an order that ends then ends the search


class _FlatJobs(Structure):
    """`Jobs` of annealing.c."""

    _fields_ = (
        ("count", c_int64),
        ("time", POINTER(c_int64)),
        ("least", POINTER(c_int64)),
        ("first", POINTER(c_int64)),
        ("awaits", POINTER(c_int64)),
        ("exchange", c_char_p),
        ("after", c_char_p),
    )


def anneal(jobs: Jobs, start: tuple[int, ...], draw: Random, cooling: Cooling) -> tuple[int, ...] | None:
    """The best order that an annealing from `start` meets; None if it cannot run in C. `draw` is left as it is."""
    library = loaded()
    if library is None or not jobs or sum(jobs.time) >= EXACT:
        return None
    count, after = len(jobs), bytearray(len(jobs) ** 2)
    assert sorted(start) == [*range(count)], "the C indexes by the order"
    for job, earlier in enumerate(jobs.after):
        for predecessor in earlier:
            after[job * count + predecessor] = 1
    first = [0]
    for awaited in jobs.awaits:
        first.append(first[-1] + len(awaited))
    best = (c_int64 * count)(*start)
    described = _FlatJobs(
        count,
        _numbers(jobs.time),
        _numbers(jobs.least),
        _numbers(first),
        _numbers([job for awaited in jobs.awaits for job in awaited]),
        bytes(jobs.exchange),
        bytes(after),
    )
    words = (c_uint32 * native.WORDS)(*draw.getstate()[1])
    failed = library.anneal(
        byref(described),
        words,
        c_int64(cooling.steps),
        c_double(cooling.heat),
        c_double(cooling.factor),
        c_int64(cooling.least),
        best,
    )
    return None if failed else tuple(best)


def _numbers(values: list[int] | tuple[int, ...]) -> object:
    return (c_int64 * len(values))(*values)


def loaded() -> CDLL | None:
    """The library; None if it cannot be compiled or loaded."""
    return native.loaded(SOURCE)
