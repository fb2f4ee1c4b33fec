"""Compare our matrix products with torch's, at the shapes of training, on one core.

    python -m benchmarks.products [--out benchmarks/results/products.txt]

Forward (x·wᵀ), gradient of the inputs (dy·w) and of the weights (dyᵀ·x, added to FP32), for R rows, K inputs and N
outputs. Operands are not in the cache before a product, as in a step; torch's allocator keeps freed memory, as in
training. GFLOP/s are by the thread's CPU time, the best of five interleaved rounds. torch calls MKL for FP32 and oneDNN
for BF16. E4M3 has the scales of `fp8_block`; torch has no such product, so operands are dequantised to BF16 first.
`another R each time`: an expert gets another number of rows in every step, and oneDNN generates a kernel for each. Here
R is random, from 1 to twice the given R (for E4M3 a multiple of 128), in one round.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.ops.linear import linear_fp8, linear_fp8_dgrad, linear_fp8_wgrad_
from runtime.ops.native import library
from runtime.ops.native import ops as native
from runtime.ops.quantise import quantise, quantise_blocks, quantise_columns

SIZES = ((2048, 256, 256), (2048, 256, 512), (2048, 256, 4096), (256, 256, 256), (256, 128, 256), (1024, 1024, 1024))
COLD = 64 * 2**20  # bytes of operands, more than the caches
ROUNDS = 5
E4M3, TILE = torch.float8_e4m3fn, 128
Operands = tuple[Tensor, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of product."""

    name: str
    operands: Callable[[Tensor, Tensor, Tensor], Operands]  # from x_RK, dy_RN and w_NK
    ours: Callable[..., object]
    torchs: Callable[..., object]


KINDS = (
    Kind("forward", lambda x, dy, w: (x, w.t()), lambda a, b: _ours(a, b), torch.mm),
    Kind("dgrad", lambda x, dy, w: (dy, w), lambda a, b: _ours(a, b), torch.mm),
    Kind(
        "wgrad", lambda x, dy, w: (torch.zeros(w.shape), dy.t(), x), lambda *o: _added(*o), lambda *o: _torch_added(*o)
    ),
)
KINDS_OF_E4M3 = (
    Kind("forward", lambda x, dy, w: _by_rows(x, *quantise_blocks(w)[:2]), linear_fp8, lambda *o: _widened(*o)),
    Kind(
        "dgrad",
        lambda x, dy, w: _by_rows(dy, *quantise_blocks(w.t())[:2]),
        linear_fp8_dgrad,
        lambda *o: _widened(*o),
    ),
    Kind(
        "wgrad",
        lambda x, dy, w: (torch.zeros(w.shape), *quantise_columns(dy), *quantise_columns(x)),
        linear_fp8_wgrad_,
        lambda acc, *o: acc.add_(_widened(*o)),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="also write the table to a file")
    args = parser.parse_args()
    if library.missing():
        raise SystemExit(f"nothing to compare: {library.missing()}")
    torch.set_num_threads(1)
    for threshold in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(threshold, 1 << 30)
    text = table()
    print(text, end="")
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    return 0


def table() -> str:
    machine = f"Python {platform.python_version()}, torch {torch.__version__}, {library.identity()}"
    lines = [
        machine,
        "",
        f"{'':14}{'R':>6}{'K':>6}{'N':>6}   " + "".join(f"{k.name + ', ours':>15}{'torch':>7}" for k in KINDS),
    ]
    for dtype in (torch.float32, torch.bfloat16, E4M3):
        for R, K, N in SIZES:
            lines.append(_line(dtype, R, K, N, [R] * max(2, COLD // (4 * (R * K + R * N + N * K)))))
        drawn, unit = random.Random(1), TILE if dtype == E4M3 else 1
        rows = [unit * drawn.randint(1, 512 // unit) for _ in range(200)]
        lines.append(_line(dtype, 256, 128, 256, rows, "  another R each time"))
    return "\n".join(lines) + "\n"


def _line(dtype: torch.dtype, R: int, K: int, N: int, rows: list[int], note: str = "") -> str:
    stored = torch.bfloat16 if dtype == E4M3 else dtype
    sets = [(torch.randn(r, K).to(stored), torch.randn(r, N).to(stored), torch.randn(N, K).to(stored)) for r in rows]
    kinds, rounds = KINDS_OF_E4M3 if dtype == E4M3 else KINDS, 1 if note else ROUNDS
    flops = 2 * sum(rows) * K * N
    rates = "".join(f"{a:15.0f}{b:7.0f}" for a, b in (_rates(kind, sets, flops, rounds) for kind in kinds))
    return f"{str(dtype).removeprefix('torch.'):14}{R:6}{K:6}{N:6}   {rates}{note}"


def _rates(kind: Kind, sets: list[tuple[Tensor, Tensor, Tensor]], flops: int, rounds: int) -> tuple[float, float]:
    operands = [kind.operands(*tensors) for tensors in sets]
    best = [1e30, 1e30]
    for _ in range(rounds):
        for index, function in enumerate((kind.ours, kind.torchs)):
            begin = time.thread_time_ns()
            for arguments in operands:
                function(*arguments)
            best[index] = min(best[index], time.thread_time_ns() - begin)
    return flops / best[0], flops / best[1]


def _ours(a: Tensor, b: Tensor) -> None:
    native.product_(a.new_empty((a.shape[0], b.shape[1])), a, b)


def _added(acc: Tensor, a: Tensor, b: Tensor) -> None:
    native.product_(acc, a, b, add=True)


def _torch_added(acc: Tensor, a: Tensor, b: Tensor) -> None:
    if acc.dtype == a.dtype:
        acc.addmm_(a, b)
    else:
        acc.add_(torch.mm(a, b))


def _by_rows(x: Tensor, w: Tensor, scales: Tensor) -> Operands:
    return *quantise(x), w, scales


def _widened(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    """a·bᵀ, with operands dequantised to BF16."""
    return torch.mm(_bf16(a, a_scales), _bf16(b, b_scales).t())


def _bf16(q: Tensor, scales: Tensor) -> Tensor:
    """Dequantise to BF16, with scales of row tiles or of blocks. Tiles must be whole."""
    tiles = q.to(torch.bfloat16).view(len(scales), -1, scales.shape[1], TILE)
    return (tiles * scales.to(torch.bfloat16)[:, None, :, None]).view(q.shape)


if __name__ == "__main__":
    sys.exit(main())
