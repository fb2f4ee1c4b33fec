"""Records which places of mutants any process of a test executes. Every Python of a probed copy imports it.

The file that MUTANT_PROBES names has a byte for each mutant. Processes that are started or forked share it. Processes
whose environment was cleared share another file, beside this one.
"""

import mmap
import os

NAME = "MUTANT_PROBES"
NAMELESS = os.path.join(os.path.dirname(__file__), "mutant_probes.bytes")  # noqa: PTH118, PTH120
shared: mmap.mmap | None = None


def opened(path: str) -> mmap.mmap:
    with open(path, "r+b") as file:  # noqa: PTH123
        return mmap.mmap(file.fileno(), 0)


def share(path: str) -> None:
    """Note in this file from now on what this process executes."""
    global shared
    shared = opened(path)


def hit(number: int) -> None:
    if shared is not None:
        shared[number] = 1


def take() -> list[int]:
    """The places executed since the last call, or since any worker's last call by processes without environment."""
    assert shared is not None
    executed = set[int]()
    for buffer in (shared, opened(NAMELESS)):
        snapshot = buffer[:]
        buffer[:] = bytes(len(snapshot))
        executed |= {number for number, byte in enumerate(snapshot) if byte}
    return sorted(executed)


try:  # noqa: SIM105
    share(os.environ.get(NAME, NAMELESS))
except (OSError, ValueError):  # it may open no file, or no tests run
    pass
