"""Threads that take turns: which runs when several could is a fixed preference, so every run can be repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class StoppedError(Exception):
    """The run is over for this thread: another failed, or none can go on."""


class Turns:
    """One thread per rank; at each `pass_on` the first rank of `preference` that can go on takes over.

    A rank that comes last in the preference moves only when all others wait: the slowest possible rank.
    """

    def __init__(self, preference: Sequence[int]) -> None:
        self.preference = tuple(preference)
        self.wants: list[Callable[[], bool]] = [lambda: True] * len(self.preference)
        self.ended = [False] * len(self.preference)
        self.gates = [threading.Semaphore(0) for _ in self.preference]
        self.fault: BaseException | None = None

    def run(self, work: Callable[[int], None]) -> BaseException | None:
        """Run `work(rank)` in a thread per rank; what the first failing rank raised, or None."""
        threads = [threading.Thread(target=self._main, args=(work, rank), daemon=True) for rank in self.preference]
        for thread in threads:
            thread.start()
        self._hand_over()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a rank neither ended nor waits"
        return self.fault

    def pass_on(self, rank: int, until: Callable[[], bool] = lambda: True) -> None:
        """Let a preferred rank go first; comes back once `until()` holds and it is this rank's turn."""
        self.wants[rank] = until
        following = self._next()
        if following != rank or not until():
            self._hand_over()
            self.gates[rank].acquire()
        if self.fault is not None:
            raise StoppedError

    def _main(self, work: Callable[[int], None], rank: int) -> None:
        self.gates[rank].acquire()
        try:
            if self.fault is None:
                work(rank)
        except StoppedError:
            pass
        except Exception as fault:
            self.fault = self.fault or fault
        self.ended[rank] = True
        self._hand_over()

    def _next(self) -> int | None:
        return next((rank for rank in self.preference if not self.ended[rank] and self.wants[rank]()), None)

    def _hand_over(self) -> None:
        following = self._next() if self.fault is None else None
        if following is None:
            if self.fault is None and not all(self.ended):
                self.fault = TimeoutError("every rank waits")
            for gate in self.gates:
                gate.release()
        else:
            self.gates[following].release()
