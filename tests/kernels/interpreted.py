"""Checks of the emitted kernels in Triton's interpreter. They run in a process of their own, with TRITON_INTERPRET=1.

The reference is the op in `runtime.ops`, in FP64 on the same numbers. The bounds are those of rounding, not chosen:
with u = 2⁻²⁴ of FP32, a sum of n products is off by at most n·u times the sum of their magnitudes, whatever the
order of its terms, and each further operation adds one u; storing adds half a unit in the last place of the dtype.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tests.kernels.accesses
import tests.kernels.rounding  # noqa: F401
from benchmarks import kernels
from compiler.kernels import emit_kernel
from runtime import ops
from runtime.kernels import on_cuda
from tests.kernels.shapes import describe

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
        return on_cuda(str(Path(build) / "segments" / "any.py"), file.name, ops.OPS[op])(*arguments)


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


def rmsnorm(dtype: torch.dtype, rows: int, columns: int) -> None:
    x, dy = random(rows, columns + 5, dtype=dtype, seed=1)[:, 3 : columns + 3], random(rows, columns, dtype=dtype)
    w = random(columns, dtype=dtype, seed=2)
    y, rstd = run("rmsnorm", x, w, EPS)
    y_exact, rstd_exact = ops.rmsnorm(*double(x, w), EPS)
    assert rstd.dtype == torch.float32
    within(rstd, rstd_exact, rstd_exact, columns + 6)
    within(y, y_exact, y_exact.abs(), columns + 8)

    exact = dy64, x64, w64, rstd64 = double(dy, x, w, rstd)
    slope = (dy64 * w64 * x64).abs().mean(1) * rstd64**2
    magnitude = rstd64[:, None] * ((dy64 * w64).abs() + x64.abs() * slope[:, None])
    within(run("rmsnorm_dgrad", dy, x, w, rstd), ops.rmsnorm_dgrad(*exact), magnitude, columns + 10)

    acc = random(columns, seed=3)
    expected = acc.double() + ops.rmsnorm_wgrad(dy64, x64, rstd64)
    magnitude = expected.abs() + (dy64 * x64 * rstd64[:, None]).abs().sum(0)
    assert run("rmsnorm_wgrad_", acc, dy, x, rstd) is None
    within(acc, expected, magnitude, rows + 4)


def swiglu(dtype: torch.dtype, rows: int, inner: int, gated: bool) -> None:
    h, dy = 3 * random(rows, 2 * inner, dtype=dtype, seed=1), random(rows, inner, dtype=dtype, seed=2)
    if rows:
        h[0, :4] = torch.tensor([-200.0, -60.0, 60.0, 200.0])  # e^200 is more than FP32 holds
    gate = random(rows, seed=3)
    name, args = ("gated_swiglu", (h, gate)) if gated else ("swiglu", (h,))
    y = run(name, *args)
    exact = ops.OPS[name](*double(*args))
    # e^-h is off by |h| units, as its argument, h·log₂e in hardware, is rounded.
    within(y, exact, exact.abs() * (1 + h.double()[:, :inner].abs()), 12)

    found, expected = run(f"{name}_dgrad", dy, *args), ops.OPS[f"{name}_dgrad"](*double(dy, *args))
    (dh, dgate), (dh_exact, dgate_exact) = (found, expected) if gated else ((found, None), (expected, None))
    dy64, g64, u64 = double(dy, h[:, :inner], h[:, inner:])
    weight = dy64.abs() * (gate.double().abs()[:, None] if gated else 1)
    slope = torch.sigmoid(g64) * (1 + g64.abs()) ** 2
    within(dh, dh_exact, torch.cat([weight * u64.abs() * slope, weight * slope], 1), 16)
    if gated:
        within(dgate, dgate_exact, (dy64 * slope * u64).abs().sum(1), inner + 16)


def grouped_linear(dtype: torch.dtype, out: int, inner: int, experts: int, sizes: tuple[int, ...]) -> None:
    rows = sum(sizes)
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, dy = random(rows, inner, dtype=dtype, seed=1), random(rows, out, dtype=dtype, seed=2)
    w = random(experts, out, inner, dtype=dtype, seed=3)
    x64, dy64, w64 = double(x, dy, w)

    def product(name: str, found: Tensor, a: Tensor, b: Tensor, terms: int) -> None:
        within(found, ops.OPS[name](a, b, offsets), ops.OPS[name](a.abs(), b.abs(), offsets), terms + 2)

    product("grouped_linear", run("grouped_linear", x, w, offsets), x64, w64, inner)
    product("grouped_linear_dgrad", run("grouped_linear_dgrad", dy, w, offsets), dy64, w64, out)

    acc = random(experts, out, inner, seed=4)
    expected = acc.double() + ops.grouped_linear_wgrad(dy64, x64, offsets, experts)
    magnitude = expected.abs() + ops.grouped_linear_wgrad(dy64.abs(), x64.abs(), offsets, experts)
    assert run("grouped_linear_wgrad_", acc, dy, x, offsets) is None
    within(acc, expected, magnitude, max(rows, 1) + 2)


def grouped_linear_of_random_sizes(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts, sources = (int(torch.randint(1, 5, (), generator=generator)) for _ in range(2))
    sizes = torch.randint(0, 90, (sources * experts,), generator=generator)
    sizes[torch.rand(sizes.shape, generator=generator) < 0.3] = 0
    out, inner = (int(torch.randint(1, 100, (), generator=generator)) for _ in range(2))
    grouped_linear(torch.bfloat16 if seed % 2 else torch.float32, out, inner, experts, tuple(sizes.tolist()))


def grouped_linear_with_nan(dtype: torch.dtype) -> None:
    """Row 0 stands in where a tile is not full; what it holds must not reach other rows or other experts."""
    out, inner, experts, offsets = 40, 24, 2, torch.tensor([5, 35, 50, 57], dtype=torch.int32)

    def results(first: float) -> list[Tensor]:
        x, dy = random(57, inner, dtype=dtype, seed=1), random(57, out, dtype=dtype, seed=2)
        w, acc = random(experts, out, inner, dtype=dtype, seed=3), random(experts, out, inner, seed=4)
        x[0], dy[0] = first, first
        run("grouped_linear_wgrad_", acc, dy, x, offsets)
        return [run("grouped_linear", x, w, offsets), run("grouped_linear_dgrad", dy, w, offsets), acc]

    for with_nan, without in zip(results(torch.nan), results(1.0), strict=True):
        assert with_nan[0].isnan().all() and torch.equal(with_nan[1:], without[1:])


def once(call: Callable[[], Any]) -> float:
    call()
    return 1.0


def benchmark(dtype: torch.dtype) -> None:
    """What benchmarks/kernels.py does on CUDA, here with small sizes on the CPU."""
    sizes = kernels.Sizes(tokens=40, rows=96, hidden=64, dense=96, inner=48, experts=2, sources=3)
    with tempfile.TemporaryDirectory() as folder:
        for cases in (kernels.row_cases, kernels.grouped_cases):
            for case in cases(sizes, dtype, "cpu"):
                row = kernels.measure(case, NUM_SMS, Path(folder), once, copy=1e9)
                assert 0 <= row.error <= 1 and (row.tflops is None) != (row.share_of_copy is None)
