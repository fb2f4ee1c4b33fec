"""The ops of every layer as plain functions. Emitted code calls them; on the CPU they are also what runs.

An op has a forward, a gradient for its activations (`_dgrad`), a gradient for its weight (`_wgrad`), and a variant that
adds the weight gradient to a buffer (`_wgrad_`). `product` says what is BF16 and what is wider. Activations are
row-major [rows, columns]; indices are int64, offsets int32. Results are contiguous, except that scales of row tiles are
stored column by column. Results never share storage with an argument, and the same arguments give the same bits.

Each module lists its ops in a tuple `OPS`. The package collects them in a table and exports each by name:
`from runtime.ops import linear`. The rules in `compiler/model/ops` define shapes, dtypes and gradients.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any


def _collect_ops() -> dict[str, Callable[..., Any]]:
    """Return the ops of all modules of this package, by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    ops = sorted((op for module in modules for op in getattr(module, "OPS", ())), key=lambda op: op.__name__)
    ops_by_name = {op.__name__: op for op in ops}
    assert len(ops_by_name) == len(ops), f"duplicate op in {[op.__name__ for op in ops]}"
    return ops_by_name


OPS = _collect_ops()
globals().update(OPS)  # replaces the modules of the same names
