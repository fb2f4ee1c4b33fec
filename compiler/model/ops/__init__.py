"""One torch-free rule per op of `runtime.ops`: its shapes, dtypes, gradients, FLOPs, bytes and kernel class.

Each module here is a family of ops. `RULES` collects the ops that layers call, `CASTS` those that the storage pass
inserts (`compiler/model/segments/storage.py`).
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from compiler.model.ops.rule import Extent, Gradient, Rule, Shape, Tensor
from compiler.model.ops.torch_calls import is_torch_call, torch_kernel_class

__all__ = ["CASTS", "GRADIENTS", "RULES", "Extent", "Gradient", "Rule", "Shape", "Tensor", "kernel_class"]


def _rows(table: str) -> dict[str, Rule]:
    """Merge the tables of this name of all families, by op."""
    merged: dict[str, Rule] = {}
    for family in pkgutil.iter_modules(__path__):
        rows = getattr(import_module(f"{__name__}.{family.name}"), table, {})
        assert not rows.keys() & merged.keys(), f"two rules of {rows.keys() & merged.keys()}"
        merged |= rows
    return dict(sorted(merged.items()))


RULES, CASTS = _rows("RULES"), _rows("CASTS")
GRADIENTS = {gradient.op: gradient for rule in RULES.values() for gradient in rule.gradients if gradient.op}

_CLASSES = {op: rule.kernel_class for op, rule in (RULES | CASTS).items()} | {
    gradient.op: gradient.kernel_class or rule.kernel_class
    for rule in RULES.values()
    for gradient in rule.gradients
    if gradient.op not in RULES
}


def kernel_class(op: str) -> str:
    """The kernel class of an op, a gradient op or a torch op. Raises KeyError if there is no rule."""
    return torch_kernel_class(op) if is_torch_call(op) else _CLASSES[op]
