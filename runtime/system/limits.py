"""Limits that a process sets for itself before it runs untrusted code: a tokenizer, a table, a reward."""

from __future__ import annotations

import ctypes
import resource
import signal


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, and disable core files."""
    ends_with_parent_by(signal.SIGKILL)
    limit(resource.RLIMIT_CORE, 0)


def ends_with_parent_by(sent: signal.Signals) -> None:
    """Let the kernel send a signal to this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(1, sent)  # PR_SET_PDEATHSIG


def take_orphans() -> None:
    """Make this process adopt descendants whose parent ends."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def limit(kind: int, soft: int) -> None:
    """Set the soft limit of a resource (resource.RLIMIT_*), at most to the hard limit."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def cap(kind: int, maximum: int) -> None:
    """Set both limits of a resource, so that this process and its children cannot raise it again."""
    _, hard = resource.getrlimit(kind)
    maximum = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
    resource.setrlimit(kind, (maximum, maximum))


def memory_limit_message(data_bytes: int) -> str:
    """Return the message for a process that exceeds its memory limit."""
    return f"it needs more than {data_bytes / 2**30:.3g} GiB of memory"
