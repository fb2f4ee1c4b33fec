"""The gradients of gate weights, moved back to token order: when the Triton kernel applies and how it launches."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice
from compiler.ir import Buffer


def choose(gate: Buffer) -> KernelChoice | None:
    """Choose the kernel. A program has one block: 4096 tokens with 8 choices are 128 programs."""
    if gate.dtype not in BYTES:
        return None
    launch = {"BLOCK_S": 256, "num_warps": 4, **FUSION}
    return KernelChoice(f"permute_gate_{gate.dtype}", "permute_gate", (("LAUNCH", launch),))


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "permute_gate_dgrad": lambda sms, dgate, order, top_k: choose(dgate),
}
