"""Triton kernels as emitted source: one row per op that has a kernel. The reference is the op in `runtime/ops`.

A module with a template next to it (`rmsnorm.py`, `rmsnorm.py.j2`) is a family of kernels. Its `OPS` has a row for each
op: a function from the number of SMs and the op's arguments to the choice of a kernel. Ops that share a file make the
same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from compiler.emit.kernels.kernel import KernelChoice, KernelFile, render
from compiler.emit.kernels.libraries import LIBRARIES
from compiler.ir import Buffer
from compiler.model.ops.implementations import TORCH, TRITON
from compiler.model.ops.on_torch import ON_TORCH, is_cpu_only

__all__ = ["KERNELS", "ON_TORCH", "KernelFile", "KernelTarget", "emit_kernel", "reason"]


def _rows() -> dict[str, Callable[..., KernelChoice | None]]:
    """Merge the rows of all families, by op."""
    merged: dict[str, Callable[..., KernelChoice | None]] = {}
    for template in sorted(Path(__file__).parent.glob("*.py.j2")):
        family = template.name.removesuffix(".py.j2")
        if template.with_name(f"{family}.py").is_file():  # templates without a module are included by others
            rows = import_module(f"{__name__}.{family}").OPS
            assert not rows.keys() & merged.keys(), f"two kernels of {rows.keys() & merged.keys()}"
            merged |= rows
    return merged


KERNELS = _rows()


class KernelTarget(NamedTuple):
    """What the text of kernels depends on besides the calls."""

    num_sms: int  # for compute, without those reserved for communication
    choices: tuple[tuple[str, str], ...] = ()  # (op, implementation) for ops that do not run on the default one

    def implementation_of(self, op: str) -> str:
        """The implementation that the spec names for an op, or the default."""
        return dict(self.choices).get(op, TRITON)


def emit_kernel(op: str, arguments: tuple[Any, ...], num_sms: int, implementation: str = TRITON) -> KernelFile | None:
    """The kernel file with function `op` for these arguments, or None if the reference op runs.

    `arguments`: those of the call, in order: `Buffer` for tensors (rows may be "R"), else plain constants. `num_sms`:
    SMs for compute, without those reserved for communication. The text depends on nothing else, and not on the number
    of rows. `implementation`: `triton`, `torch` or a library. A kernel of Triton also stands in for a library that does
    not take the arguments.
    """
    if implementation == TORCH:
        return None
    choose = LIBRARIES[implementation].ops.get(op) if implementation in LIBRARIES else None
    if choose is not None and (choice := choose(num_sms, *arguments)) is not None:
        return render(choice)
    if op in ON_TORCH or is_cpu_only(op):
        return None
    assert op in KERNELS, f"op {op} has no row in compiler/emit/kernels and is not in ON_TORCH"
    choice = KERNELS[op](num_sms, *arguments)
    return render(choice) if choice else None


def reason(op: str, arguments: Sequence[Any], implementation: str = TRITON) -> str:
    """Why `emit_kernel` returns None for these arguments."""
    if implementation == TORCH:
        return "the spec names torch for it"
    if op in ON_TORCH:
        return ON_TORCH[op]
    if is_cpu_only(op):
        return "its format is computed on CPUs alone"
    if op not in KERNELS:
        return "nobody has written a kernel for it"
    dtypes = {argument.dtype for argument in arguments if isinstance(argument, Buffer)}
    return f"its kernel does not take {'FP64' if 'float64' in dtypes else 'these sizes and dtypes'}"
