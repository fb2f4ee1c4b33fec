"""The permutation of rows into expert order: when the Triton kernels apply and how they launch.

Their text is permute.py.j2, which includes that of the router if one launch routes and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from compiler.emit.kernels.kernel import FUSION, KernelChoice, power_of_two
from compiler.emit.kernels.route import has_kernels, lanes, routing, scores
from compiler.ir import Buffer

STREAMS = {"_place": ("ld.global.cg", "st.global.cs")}

BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
TILE = 128  # columns with one scale
BLOCK_T = 32  # tokens of a block: 4096 tokens are 128 programs, each on its own SM
BLOCKS = 256  # most blocks of tokens before blocks grow: with 256 experts, a program of the second launch reads 128 KiB


def _permute(x: Buffer, scales: Buffer | None, expert: Buffer, experts: int) -> KernelChoice | None:
    columns, top_k = int(x.shape[1]), int(expert.shape[1])
    if not _can_move(x, scales) or not has_kernels(experts, top_k, "float32"):
        return None
    return KernelChoice(
        name=f"permute_e{experts}_k{top_k}_d{columns}_{x.dtype}",
        template="permute",
        values=(
            ("routed", False),
            *_placement_constants(experts, top_k, columns, x.dtype),
            ("COUNT", {**_lanes(experts, top_k), "TOKENS": 2, "num_warps": 4, **FUSION}),
        ),
    )


class RoutingArguments(NamedTuple):
    """The arguments of the op after its tensors: how experts are chosen."""

    softmax: bool
    groups: int
    top_groups: int
    top_k: int
    normalize: bool
    scale: float


def _choose_routed(logits: Buffer, x: Buffer, scales: Buffer | None, settings: RoutingArguments) -> KernelChoice | None:
    """A block is routed in tiles of at most 4096 scores, 8 per thread: 83 to 106 registers; 8192 take up to 175."""
    softmax, groups, top_groups, top_k, normalize, _ = settings
    experts, columns = int(logits.shape[1]), int(x.shape[1])
    if not _can_move(x, scales) or not has_kernels(experts, top_k, logits.dtype):
        return None
    launch = lanes(experts, groups, top_groups, top_k)
    width = launch["BLOCK_G"] * launch["BLOCK_M"]
    rows = min(BLOCK_T, 4096 // width)
    sizes = f"e{experts}_g{groups}_{top_groups}_k{top_k}"
    return KernelChoice(
        name=f"route_permute_{sizes}_{scores(softmax, normalize)}_d{columns}_{x.dtype}",
        template="permute",
        values=(
            ("routed", True),
            ("permuted", True),
            *routing(experts, softmax, groups, top_groups, top_k, normalize),
            *_placement_constants(experts, top_k, columns, x.dtype),
            ("ROWS", rows),
            ("ROUTE", {**launch, "num_warps": min(16, max(4, rows * width // 256)), **FUSION}),
        ),
    )


def _can_move(x: Buffer, scales: Buffer | None) -> bool:
    return x.dtype in BYTES and (scales is not None) == (x.dtype == "float8_e4m3fn")


def _placement_constants(experts: int, top_k: int, columns: int, dtype: str) -> tuple[tuple[str, Any], ...]:
    """Tiles of rows have at least 16 bytes per thread. Places are found with 8 comparisons per thread at a time, in 62
    to 80 registers, so that three programs fit on an SM; 16 or 32 comparisons take 112 to 128, or spill.
    """
    block, scales = min(512, power_of_two(columns)), -(-columns // TILE) if dtype == "float8_e4m3fn" else 0
    tokens = min(BLOCK_T, max(4, 4096 // (block * BYTES[dtype])))
    place = {
        **_lanes(experts, top_k),
        "BLOCK_D": block,
        "BLOCK_B": power_of_two(max(1, scales)),
        "TOKENS": tokens,
        "OTHERS": max(16, 2048 // (tokens * power_of_two(top_k))),
        "BLOCKS": max(1, 4096 // power_of_two(experts)),
    }
    return (
        ("scaled", scales > 0),
        ("E", experts),
        ("K", top_k),
        ("D", columns),
        ("B", scales),
        ("BLOCK_T", BLOCK_T),
        ("BLOCKS", BLOCKS),
        ("PARTS", 2 if -(-columns // block) % 2 == 0 else 1),
        ("PLACE", {**place, "num_warps": 8, **FUSION}),
    )


def _lanes(experts: int, top_k: int) -> dict[str, int]:
    return {"BLOCK_E": power_of_two(experts), "BLOCK_K": power_of_two(top_k)}


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "permute": lambda sms, x, gate, expert, num_experts: _permute(x, None, expert, num_experts),
    "permute_fp8": lambda sms, x, scales, gate, expert, num_experts: _permute(x, scales, expert, num_experts),
    "permute_placed": lambda sms, x, gate, expert, slots: _permute(x, None, expert, int(slots.shape[0])),
    "permute_placed_fp8": lambda sms, x, scales, gate, expert, slots: _permute(x, scales, expert, int(slots.shape[0])),
    "route_permute": lambda sms, logits, bias, x, slots, *settings: _choose_routed(
        logits, x, None, RoutingArguments(*settings)
    ),
    "route_permute_fp8": lambda sms, logits, bias, x, scales, slots, *settings: _choose_routed(
        logits, x, scales, RoutingArguments(*settings)
    ),
}
