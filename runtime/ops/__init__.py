"""The ops of every layer, as plain functions: what emitted code calls, and on the CPU what it runs.

An op has a forward, a gradient of its activations (`_dgrad`) and of its weight (`_wgrad`), and the latter added to a
buffer (`_wgrad_`). What is BF16 and what is not is in `product`. Activations are row-major [rows, columns]; indices are
int64, offsets int32. Results are contiguous, but for the scales of tiles of rows, which lie column by column, and
never share storage with an argument; the same arguments give the same bits. Each module lists its ops in a tuple
`OPS`. The package has them all in a table, and each under its own name: `from runtime.ops import linear`. Shapes,
dtypes and gradients are facts of rules, in `compiler/model/ops`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any


def _listed() -> dict[str, Callable[..., Any]]:
    """The ops of all modules here, by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    ops = sorted((op for module in modules for op in getattr(module, "OPS", ())), key=lambda op: op.__name__)
    found = {op.__name__: op for op in ops}
    assert len(found) == len(ops), f"an op twice in {[op.__name__ for op in ops]}"
    return found


OPS = _listed()
globals().update(OPS)  # over the modules of the same names
