"""How far a process of weights is, on stdout for the command that started it: a line of JSON now and then."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import monotonic

EVERY_S = 0.2


def reporting(total: int) -> Callable[[int], None]:
    """A function that adds a number of tensors to what is done, of `total`."""
    done, last = 0, monotonic()

    def add(count: int) -> None:
        nonlocal done, last
        done += count
        if monotonic() - last > EVERY_S:
            last = monotonic()
            print(json.dumps({"done": done, "total": total}), flush=True)

    return add
