"""Rotation before attention: when the Triton kernels apply and how they launch. Text: rotate.py.j2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, Places, places, power_of_two
from compiler.ir import Buffer

STREAMS = {"_turn": ("ld.global.L1::evict_first",)}
FACTORS = 7  # arguments for the rotation of columns, before starts and positions
TILE = 2048  # columns that a program owns: several heads of several tokens


def choose(x: Buffer, heads: int, first: int, width: int, row_places: Places) -> KernelChoice | None:
    """Choose the kernel. It applies if a head fits into a program and `first` is even, so that pairs are adjacent."""
    columns = int(x.shape[1]) // heads
    block = power_of_two(columns)
    if x.dtype not in BYTES or block < 2 or block > TILE or first % 2:
        return None
    num = min(power_of_two(heads), TILE // block)
    launch = {"TOKENS": TILE // (block * num), "HEADS": num, "num_warps": 4, **FUSION}
    return KernelChoice(
        name=f"rotate_h{heads}_c{columns}_f{first}_r{width}_{x.dtype}{row_places}",
        template="rotate",
        values=(
            ("documents", row_places.documents),
            ("positions", row_places.positions),
            ("HEADS", heads),
            ("C", columns),
            ("BLOCK", block),
            ("FIRST", first),
            ("R", width),
            ("LAUNCH", launch),
        ),
    )


def _row(
    sms: int, x: Buffer, sequence: int, heads: int, first: int, width: int, *arguments: Any
) -> KernelChoice | None:
    return choose(x, heads, first, width, places(arguments[FACTORS : FACTORS + 2]))


OPS: dict[str, Callable[..., KernelChoice | None]] = {"rotate": _row, "rotate_dgrad": _row}
