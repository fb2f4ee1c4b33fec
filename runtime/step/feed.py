"""The samples of a step, read by a thread beside the step before: no step but the first waits for them.

What a rank reads is what it has asked for in the step before: a pipeline rank without embedding and head reads no
tokens (runtime/step/micro_batches.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from runtime.step.micro_batches import Indices, MicroBatches

Find = Callable[[], MicroBatches]


class _Ahead(NamedTuple):
    samples: bytes
    found: Future[MicroBatches]


class Feed:
    """Micro-batches of the steps of a rank. `names`: what a step asks for, None until one has been executed; `waits`:
    how many steps began before their samples were read."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "samples")
        self._ahead: _Ahead | None = None
        self.names: tuple[str, ...] | None = None
        self.waits = 0

    def take(self, samples: Indices, find: Find) -> MicroBatches:
        """Micro-batches of these samples: those that were read ahead, if they are of these, else those of `find`. What
        a step asks for is on the device then."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.samples == samples.tobytes():
            self.waits += not ahead.found.done()
            found = ahead.found.result()
        else:
            self.waits += 1
            found = find()
        for name in self.names or ():
            _ = found[name]
        return found

    def read_ahead(self, samples: Indices, find: Find) -> None:
        """Begin to read what the next step asks for, of these samples."""
        self._ahead = _Ahead(samples.tobytes(), self._thread.submit(_read, find, self.names or ()))


def _read(find: Find, names: Collection[str]) -> MicroBatches:
    found = find()
    found.read(names)
    return found
