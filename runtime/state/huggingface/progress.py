"""Progress of importing or exporting weights: lines of JSON on stdout for the command that started the process."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import monotonic

EVERY_S = 0.2


def make_reporter(total: int) -> Callable[[int], None]:
    """Return a function that adds a number of finished tensors and reports progress towards `total`."""
    num_done, last = 0, monotonic()

    def add(count: int) -> None:
        nonlocal num_done, last
        num_done += count
        if monotonic() - last > EVERY_S:
            last = monotonic()
            print(json.dumps({"done": num_done, "total": total}), flush=True)

    return add
