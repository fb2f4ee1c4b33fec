"""A lock between processes, which says for whom it waits. The kernel gives it back when a process dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.data.files import descriptor_of_regular

SAID_AFTER_S = 2.0
POLL_S = 0.1
MAX_HOLDER_BYTES = 4096


@contextmanager
def locked(path: Path, purpose: str, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file `path`, which then names this process and `purpose`.

    While another process holds it, `say` is called again and again from 2 s on with who that is. Raises OSError or
    DataError where there is something else than a lock file: a symbolic link, a pipe.
    """
    handle = descriptor_of_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        begun = time.monotonic()
        while not _taken(handle):
            if time.monotonic() - begun > SAID_AFTER_S:
                say(f"waiting for {_holder(handle)} (lock: {path})")
            time.sleep(POLL_S)
        with suppress(OSError):  # a full disk: nobody can read who holds the lock, which is held all the same
            os.ftruncate(handle, 0)
            holder = f"process {os.getpid()}, which prepares data for {purpose}"
            os.pwrite(handle, holder.encode("utf-8", "surrogateescape"), 0)  # a path may be any bytes
        yield
    finally:
        os.close(handle)


@contextmanager
def tried(path: Path) -> Iterator[bool]:
    """Holds the lock file if no other process does; says whether it is held."""
    handle = descriptor_of_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        yield _taken(handle)
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(handle: int) -> str:
    text = os.pread(handle, MAX_HOLDER_BYTES, 0).decode("utf-8", "replace")
    return text or "another process, which prepares data"
