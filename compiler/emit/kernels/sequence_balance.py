"""The balance loss of sequences: when the Triton kernels apply and how they launch. Text: sequence_balance.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import FUSION, KernelChoice, power_of_two
from compiler.emit.kernels.route import has_kernels


def choose(experts: int, dtype: str, top_k: int, softmax: bool) -> KernelChoice | None:
    """A program has 32 tokens, so that 4096 tokens keep 128 SMs busy, in tiles of 8 scores per thread: 113 to 170
    registers; with 16 it spills. The single program that adds their results has tiles of 16: 58 to 80 registers.
    """
    if not has_kernels(experts, top_k, dtype):
        return None
    block = power_of_two(experts)
    return KernelChoice(
        name=f"sequence_balance_e{experts}_k{top_k}_{'softmax' if softmax else 'sigmoid'}",
        template="sequence_balance",
        values=(
            ("E", experts),
            ("K", top_k),
            ("SOFTMAX", softmax),
            ("BLOCK_T", 32),
            ("LAUNCH", {"BLOCK_E": block, "ROWS": min(32, 2048 // block), "num_warps": 8, **FUSION}),
            ("TOTAL", {"BLOCK_E": block, "ROWS": max(1, 4096 // block), "num_warps": 8, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "sequence_balance": lambda sms, logits, expert, sequence, softmax: choose(
        int(logits.shape[1]), logits.dtype, int(expert.shape[1]), softmax
    ),
    "sequence_balance_dgrad": lambda sms, dloss, logits, expert, sequence, softmax: choose(
        int(logits.shape[1]), logits.dtype, int(expert.shape[1]), softmax
    ),
}
