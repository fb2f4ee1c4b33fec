"""The tickets of a queue, drawn in Triton's interpreter. For a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import tests.compiler.emit.kernels.accesses  # noqa: F401
from benchmarks.queue import legs
from compiler.emit.kernels import emit_kernel
from compiler.emit.kernels.kernel import LEGS
from compiler.ir import Buffer
from tests.compiler.emit.kernels.gate_launch import load


def _emitted() -> Any:
    """`_leg` as kernels have it."""
    rows, scales = Buffer("x", ("R", 128), "float8_e4m3fn"), Buffer("scales", (1, 1), "float32")
    file = emit_kernel("linear_fp8", (rows, scales, Buffer("w", (128, 128), "float8_e4m3fn"), scales), 4)
    assert file
    with tempfile.TemporaryDirectory() as folder:
        return load(file, Path(folder))._leg


_leg = _emitted()


@triton.jit
def _draws(queue: Any, drawn: Any, num_tiles: Any, PROGRAMS: tl.constexpr) -> None:
    """Every program draws once."""
    low, high, has_leg = _leg(queue, num_tiles, PROGRAMS)
    address = drawn + tl.program_id(0) * 3
    tl.store(address, low)
    tl.store(address + 1, high)
    tl.store(address + 2, has_leg.to(tl.int32))


def tickets(tiles: int, programs: int) -> None:
    """Tickets equal the simulation, then each program gets none; after the last one the queue is 0 again."""
    expected = legs(tiles, programs)
    queue, drawn = torch.zeros(4, dtype=torch.int32), torch.zeros(len(expected) + programs, 3, dtype=torch.int32)
    for _ in range(2):  # the second launch finds the queue as the first did
        _draws[(len(drawn),)](queue, drawn.zero_(), tiles, programs)
        drawn_legs = [range(low, high, programs) for low, high, has_leg in drawn.tolist() if has_leg]
        assert len(expected) <= LEGS * programs and list(map(list, drawn_legs)) == list(map(list, expected))
        assert drawn[len(expected) :, 2].tolist() == [0] * programs
        assert sorted(tile for leg in drawn_legs for tile in leg) == list(range(tiles))
