"""Gradients of gate weights back to their tokens: when the Triton kernel applies and how it is launched."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice
from compiler.ir import Buffer


def choose(gate: Buffer) -> KernelChoice | None:
    """A block a program: 4096 tokens of 8 choices are 128 programs."""
    if gate.dtype not in BYTES:
        return None
    launch = {"BLOCK_S": 256, "num_warps": 4, **FUSION}
    return KernelChoice(f"permute_gate_{gate.dtype}", "permute_gate", (("LAUNCH", launch),))


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "permute_gate_dgrad": lambda sms, dgate, order, top_k: choose(dgate),
}
