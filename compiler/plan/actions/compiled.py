"""Annealing in C (annealing.c), which gives the same orders as the one in Python, in a twentieth of the time.

The C is compiled when it is first needed (0.1 s), next to this file or in the folder in DSC_NATIVE. Installing dsc
compiles it too (hatch_build.py). Without a C compiler, or in a folder that cannot be written, orders are searched in
Python.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
from contextlib import suppress
from ctypes import CDLL, POINTER, Structure, byref, c_char_p, c_double, c_int64, c_uint32
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from compiler.plan.actions.lanes import Jobs  # hatch_build.py runs this file alone

HERE = Path(__file__).parent
ELSEWHERE = "DSC_NATIVE"  # environment variable: the folder of the library, as of that of the ops
SOURCE, LIBRARY = HERE / "annealing.c", "libannealing.so"
FLAGS = ("-O2", "-g0", "-ffp-contract=off", "-shared", "-fPIC")  # no contraction: doubles are rounded as in Python
LIMIT_S = 60  # for the compiler
EXACT = 1 << 53  # integers below it are exact as doubles
WORDS = 625  # of the state of `Random`


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
    words = (c_uint32 * WORDS)(*draw.getstate()[1])
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


@cache
def loaded() -> CDLL | None:
    """The library; None if it cannot be compiled or loaded."""
    if build() is not None:
        return None
    try:
        return CDLL(str(_path()))
    except OSError:
        return None


def build() -> str | None:
    """Compile the library if it is missing or outdated. Return None, or in one line why it failed."""
    path = _path()
    if _is_current(path):
        return None
    import subprocess  # 10 ms, which most plans do not need

    scratch = path.with_suffix(f".{os.getpid()}")
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or [*filter(shutil.which, ("cc", "gcc", "clang"))][:1]
        if not compiler:
            return "no C compiler was found"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            return f"{path.parent} cannot be written"
        command = [*compiler, *FLAGS, "-o", str(scratch.absolute()), str(SOURCE), "-lm"]
        subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=True)
        with scratch.open("ab") as file:  # written last, so a truncated file is not current
            file.write(_digest())
        scratch.replace(path)  # processes that have loaded the old file keep it
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        with suppress(OSError):
            scratch.unlink()
    return None


def _path() -> Path:
    return Path(os.environ.get(ELSEWHERE) or HERE) / LIBRARY


def _is_current(library: Path) -> bool:
    """Whether a library was built from the current source and flags."""
    try:
        return library.read_bytes()[-len(_digest()) :] == _digest()
    except OSError:
        return False


def _digest() -> bytes:
    return hashlib.sha256(SOURCE.read_bytes() + " ".join((*FLAGS, platform.machine())).encode()).digest()
