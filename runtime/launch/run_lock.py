"""The lock of a run folder: two runs in one folder would mix their checkpoints.

The kernel releases the lock when the process that holds it dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

LOCK = ".lock"
LOCK_S = 1.0  # the ranks of a launch that was just killed take a moment to end


class RunFolderBusyError(RuntimeError):
    """Another launch is running in this folder."""


def lock_folder(folder: Path, *, create: bool = True) -> int:
    """Lock the folder until the returned descriptor is closed, in this process and in those forked meanwhile.

    Raises RunFolderBusyError if another run holds it. With `create` False, FileNotFoundError if no run ever did.
    """
    until = time.monotonic() + LOCK_S
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    lock = os.open(folder / LOCK, flags, 0o644)
    while not _try_lock(lock):
        if time.monotonic() > until:
            os.close(lock)
            raise RunFolderBusyError(f"another run is using {folder}")
        time.sleep(0.01)
    return lock


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
