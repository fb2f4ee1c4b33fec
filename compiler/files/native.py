"""Libraries in C for searches. Each gives the same results as the Python next to it, many times faster.

A library is compiled when it is first needed (0.1 s to 0.5 s), next to its source or in the folder in DSC_NATIVE.
Installing dsc compiles all of them (hatch_build.py). Without a C compiler, or in a folder that cannot be written,
searches run in Python.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
from contextlib import suppress
from ctypes import CDLL
from functools import cache
from pathlib import Path

ELSEWHERE = "DSC_NATIVE"  # environment variable: the folder of the libraries, as of those of the ops
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ("-O2", "-g0", "-ffp-contract=off", "-shared", "-fPIC")  # no contraction: doubles are rounded as in Python
LIMIT_S = 60  # for the compiler
WORDS = 625  # of the state of `Random`, which random.h takes


@cache
def loaded(source: Path) -> CDLL | None:
    """The library of a source; None if it cannot be compiled or loaded."""
    if build(source) is not None:
        return None
    try:
        return CDLL(str(library_of(source)))
    except OSError:
        return None


def build(source: Path) -> str | None:
    """Compile a source if its library is missing or outdated. Return None, or in one line why it failed."""
    path = library_of(source)
    if _is_current(path, source):
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
        command = [*compiler, *FLAGS, "-o", str(scratch.absolute()), str(source), "-lm"]
        subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=True)
        with scratch.open("ab") as file:  # written last, so a truncated file is not current
            file.write(_digest(source))
        scratch.replace(path)  # processes that have loaded the old file keep it
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        with suppress(OSError):
            scratch.unlink()
    return None


def library_of(source: Path) -> Path:
    """The file of a source's library."""
    return Path(os.environ.get(ELSEWHERE) or source.parent) / f"lib{source.stem}.so"


def _is_current(library: Path, source: Path) -> bool:
    """Whether a library was built from the current source and flags."""
    digest = _digest(source)
    try:
        return library.read_bytes()[-len(digest) :] == digest
    except OSError:
        return False


def _digest(source: Path) -> bytes:
    texts = [path.read_bytes() for path in (source, *HEADERS)]
    return hashlib.sha256(b"".join(texts) + " ".join((*FLAGS, platform.machine())).encode()).digest()
