"""Notes which places of mutants are executed, by any process of a test: imported by every Python of a probed copy.

The file that MUTANT_PROBES names has a byte for each mutant. Processes that are started or forked share it.
"""

import mmap
import os

NAME = "MUTANT_PROBES"
shared: mmap.mmap | None = None


def open_shared(path: str) -> None:
    global shared
    with open(path, "r+b") as file:  # noqa: PTH123
        shared = mmap.mmap(file.fileno(), 0)


def hit(number: int) -> None:
    if shared is not None:
        shared[number] = 1


def take() -> list[int]:
    """The places that were executed since this was last called."""
    assert shared is not None
    taken = shared[:]
    shared[:] = bytes(len(taken))
    return [number for number, byte in enumerate(taken) if byte]


try:
    if NAME in os.environ:
        open_shared(os.environ[NAME])
except OSError:  # a process that may open no file
    pass
