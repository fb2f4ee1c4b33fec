"""Ops that a library computes on GPUs, as emitted source.

A library is named by `kernels { … }` in a run. A module here with a template next to it is a library. Its `OPS` is as
that of a family of Triton kernels: a function from the number of SMs and the op's arguments to the choice of a text, or
None if the library does not take them. Then the kernel of the build runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.emit.kernels.kernel import Family
from compiler.emit.kernels.libraries import cudnn, deep_gemm, fla, flash_attn, grouped_mm


@dataclass(frozen=True, slots=True)
class Library:
    """A library that computes ops on GPUs."""

    ops: Family
    package: str  # that each rank must have
    is_deterministic: bool  # whether a call with the same arguments gives the same bits


LIBRARIES = {
    "cudnn": Library(cudnn.OPS, "torch", is_deterministic=False),  # its gradient adds in any order
    "deep_gemm": Library(deep_gemm.OPS, "deep_gemm", is_deterministic=True),
    "fla": Library(fla.OPS, "fla", is_deterministic=True),
    "flash_attn": Library(flash_attn.OPS, "flash_attn_interface", is_deterministic=True),
    "grouped_mm": Library(grouped_mm.OPS, "torch", is_deterministic=True),
}
