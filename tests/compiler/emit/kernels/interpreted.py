"""Checks of the emitted kernels in Triton's interpreter. They run in a process of their own, with TRITON_INTERPRET=1.

The reference is the op in `runtime.ops`, or the update in `runtime.state.optimizers`, in FP64 on the same numbers. The
bounds follow from rounding: with u = 2⁻²⁴ of FP32, the error of a sum of n products is at most n·u times the
sum of their magnitudes in any order, and each further operation adds one u; storing adds half a
unit in the last place of the dtype.

A family of kernels, compiler/emit/kernels/<family>.py, has besides its `OPS`:

- tests/compiler/emit/kernels/checks_<family>.py, functions that check its ops with the tools of this module, and in it
  the literal `CHECKED = ("rmsnorm", "rmsnorm_dgrad", …)`: the ops they check. Each row of KERNELS must be in one such
  tuple.
- tests/compiler/emit/kernels/test_<family>.py, which calls them through the fixture `interpret`.
- in <family>.py, if a kernel streams, the literal `STREAMS = {"_forward": ("ld.global.L1::evict_first",
  "st.global.cs"), …}`: prefixes of PTX instructions by name of the @triton.jit function. The gate requires each
  on sm_90; if rows of a launch are wide and aligned to 16 bytes, the loads must be 16 bytes wide.

Each row of KERNELS is called by a shipped spec (compiler/emit/kernels/calls.py), or has its reason in test_gate.py.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tests.compiler.emit.kernels.accesses
import tests.compiler.emit.kernels.rounding  # noqa: F401
from compiler.emit.kernels import emit_kernel
from runtime.build.kernels import on_cuda
from runtime.ops import OPS
from runtime.state.optimizers import reference_update
from tests.compiler.emit.kernels.shapes import describe

assert os.environ.get("TRITON_INTERPRET") == "1"

U = 2.0**-24
STORED = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
NUM_SMS = 4  # so that persistent programs have several tiles each
EPS = 1e-6


def run(op: str, *arguments: Any) -> Any:
    """The op as an emitted segment would call it, its kernel emitted for these very arguments."""
    file = emit_kernel(op, describe(arguments), NUM_SMS)
    assert file
    with tempfile.TemporaryDirectory() as build:
        path = Path(build, "kernels", f"{file.name}.py")
        path.parent.mkdir()
        path.write_text(file.source)
        return on_cuda(str(Path(build) / "segments" / "any.py"), file.name, reference(op))(*arguments)


def reference(op: str) -> Any:
    """The code of an op, or of the update of an optimizer of this kind."""
    return OPS[op] if op in OPS else reference_update(op)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def within(found: Tensor, exact: Tensor, magnitude: Tensor, operations: int) -> None:
    """|found − exact| ≤ rounding of the stored value + operations · u · magnitude, element by element."""
    assert found.shape == exact.shape and found.is_contiguous()
    bound = STORED[found.dtype] * exact.abs() + operations * U * magnitude + 1e-37
    worst = ((found.double() - exact).abs() / bound).amax() if exact.numel() else torch.zeros(())
    assert worst <= 1, f"{worst:.3g} times the bound"


def double(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]
