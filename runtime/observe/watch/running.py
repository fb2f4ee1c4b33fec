"""Whether a run is running, as far as its folder shows it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from runtime.launch.run_lock import LOCK


def is_held(run: Path) -> bool:
    """Whether a process holds the lock of the run folder. False where there is none, or where locks of another machine
    are not seen."""
    try:
        lock = os.open(run / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once; a start waits for longer than that
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False
