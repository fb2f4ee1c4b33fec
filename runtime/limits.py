"""Limits that a process sets for itself before it runs what others wrote: a tokenizer, a table, a reward."""

from __future__ import annotations

import ctypes
import resource
import signal


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread ends that started it, and write no core file."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    limit(resource.RLIMIT_CORE, 0)


def limit(which: int, soft: int) -> None:
    """Set the soft limit of a resource (resource.RLIMIT_*), or its hard limit where that is lower."""
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def too_much_memory(data_bytes: int) -> str:
    """What is said of a process that needs more memory than its limit."""
    return f"it needs more than {data_bytes / 2**30:.3g} GiB of memory"
