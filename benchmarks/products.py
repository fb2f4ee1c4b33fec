"""Products of matrices as training makes them, ours beside torch's, on one core.

    python -m benchmarks.products [--out benchmarks/results/products.txt]

Forward (x·wᵀ), gradient of the inputs (dy·w) and of the weights (dyᵀ·x, added to FP32), of R rows, K inputs and N
outputs. Operands are new to the cache for every product, as in a step; torch's allocator keeps what was freed, as in
training. GFLOP/s by the processor's time of the thread, the best of five rounds in turn. torch calls MKL for FP32 and
oneDNN for BF16. `another R each time`: the rows of an expert are another number in every step, for which oneDNN makes a
kernel; here R is drawn from 1 to twice the R that is said, and there is one round.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from runtime.native import library
from runtime.native import ops as native

SIZES = ((2048, 256, 256), (2048, 256, 512), (2048, 256, 4096), (256, 256, 256), (256, 128, 256), (1024, 1024, 1024))
COLD = 64 * 2**20  # bytes of operands, more than the caches hold
ROUNDS = 5
Operands = tuple[Tensor, Tensor, Tensor]
Kind = tuple[str, Callable[[Operands], object], Callable[[Operands], object]]

KINDS: tuple[Kind, ...] = (
    ("forward", lambda t: _ours(t[0], t[2].t()), lambda t: torch.mm(t[0], t[2].t())),
    ("dgrad", lambda t: _ours(t[1], t[2]), lambda t: torch.mm(t[1], t[2])),
    ("wgrad", lambda t: _added(t[2], t[1].t(), t[0]), lambda t: _torch_added(t[2], t[1].t(), t[0])),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="write the table to a file, too")
    args = parser.parse_args()
    if library.missing():
        raise SystemExit(f"nothing to compare: {library.missing()}")
    torch.set_num_threads(1)
    for threshold in (-1, -3):  # of trimming, and of mapping
        ctypes.CDLL(None).mallopt(threshold, 1 << 30)
    said = table()
    print(said, end="")
    if args.out:
        args.out.write_text(said, encoding="utf-8")
    return 0


def table() -> str:
    machine = f"Python {platform.python_version()}, torch {torch.__version__}, {library.identity()}"
    lines = [
        machine,
        "",
        f"{'':14}{'R':>6}{'K':>6}{'N':>6}   " + "".join(f"{k[0] + ', ours':>15}{'torch':>7}" for k in KINDS),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        for R, K, N in SIZES:
            lines.append(_line(dtype, R, K, N, [R] * max(2, COLD // (4 * (R * K + R * N + N * K)))))
        drawn = random.Random(1)
        lines.append(_line(dtype, 256, 128, 256, [drawn.randint(1, 512) for _ in range(200)], "  another R each time"))
    return "\n".join(lines) + "\n"


def _line(dtype: torch.dtype, R: int, K: int, N: int, rows: list[int], note: str = "") -> str:
    sets = [(torch.randn(r, K).to(dtype), torch.randn(r, N).to(dtype), torch.randn(N, K).to(dtype)) for r in rows]
    rates = "".join(f"{a:15.0f}{b:7.0f}" for a, b in (_rates(kind, sets, 1 if note else ROUNDS) for kind in KINDS))
    return f"{str(dtype).removeprefix('torch.'):14}{R:6}{K:6}{N:6}   {rates}{note}"


def _rates(kind: Kind, sets: list[Operands], rounds: int) -> tuple[float, float]:
    name, *functions = kind
    if name == "wgrad":
        sets = [(x, dy, torch.zeros(w.shape)) for x, dy, w in sets]
    flops = sum(2 * x.shape[0] * w.numel() for x, _, w in sets)
    best = [1e30, 1e30]
    for _ in range(rounds):
        for index, function in enumerate(functions):
            begin = time.thread_time_ns()
            for operands in sets:
                function(operands)
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


if __name__ == "__main__":
    sys.exit(main())
