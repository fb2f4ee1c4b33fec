"""The clock of hang detection stands still until a fault happens, so that a loaded machine may take any time before."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from runtime.launch.rank_watch import Stillness
from tests.progress import children
from tests.runtime.processes import state

Counted = Callable[[Stillness, float, tuple[int, ...]], float]


def _counted(is_so: Callable[[], object]) -> Counted:
    seconds = Stillness.seconds

    def counted(self: Stillness, now: float, stamps: tuple[int, ...]) -> float:
        still_s = seconds(self, now, stamps)
        if not is_so():
            self.still_s = still_s = 0.0
        return still_s

    return counted


def from_then_on(monkeypatch: pytest.MonkeyPatch, is_so: Callable[[], object]) -> None:
    """Count no time until `is_so()` holds, in this process and its forks."""
    monkeypatch.setattr(Stillness, "seconds", _counted(is_so))


def install() -> None:
    """Count time only while a child of the process is stopped. For supervisors in forks: forks.RUNS_FIRST."""
    Stillness.seconds = _counted(lambda: "T" in map(state, children(os.getpid())))  # type: ignore[method-assign]
