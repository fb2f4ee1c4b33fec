"""Limits that a process sets for itself before it runs what others wrote: a tokenizer, a table, a reward."""

from __future__ import annotations

import ctypes
import resource
import signal


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread ends that started it, and write no core file."""
    ends_with_parent_by(signal.SIGKILL)
    limit(resource.RLIMIT_CORE, 0)


def ends_with_parent_by(sent: signal.Signals) -> None:
    """Let the kernel send a signal to this process when the thread ends that started it."""
    ctypes.CDLL(None).prctl(1, sent)  # PR_SET_PDEATHSIG


def take_orphans() -> None:
    """Make this process the parent of each process below it whose own parent ends."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def limit(which: int, soft: int) -> None:
    """Set the soft limit of a resource (resource.RLIMIT_*), or its hard limit where that is lower."""
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def cap(which: int, most: int) -> None:
    """Set both limits of a resource, which this process and those that it starts cannot raise again."""
    _, hard = resource.getrlimit(which)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))


def too_much_memory(data_bytes: int) -> str:
    """What is said of a process that needs more memory than its limit."""
    return f"it needs more than {data_bytes / 2**30:.3g} GiB of memory"
