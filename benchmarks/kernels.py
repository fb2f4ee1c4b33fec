"""Every emitted kernel on this machine's GPU: checked against its reference op, then timed against torch.

    python -m benchmarks.kernels          writes benchmarks/results/kernels-<device>.json

Shapes are those of one expert rank of DeepSeek-V3 at 4096 tokens: 32,768 rows over 4 experts from 64 sources, in
uneven groups. Inputs are random (zeros run faster), times are medians with L2 flushed before every run. Ops that
move memory are related to a plain copy and to eager torch, grouped products to `torch._grouped_mm`, in the same run.
Without CUDA it says so and writes nothing.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiler.ir import Buffer
from compiler.kernels import emit_kernel
from runtime import ops
from runtime.kernels import load_kernels

RESULTS = Path(__file__).parent / "results"
# Relative error in the Frobenius norm against FP64: rounding normal numbers to BF16 gives 0.00166, FP32 sums 10⁻⁶.
ERROR = {torch.bfloat16: 2e-3, torch.float32: 1e-5}
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Sizes:
    tokens: int
    rows: int
    hidden: int
    dense: int  # inner width of a dense layer
    inner: int  # of an expert
    experts: int
    sources: int


V3 = Sizes(tokens=4096, rows=32768, hidden=7168, dense=18432, inner=2048, experts=4, sources=64)


@dataclass(frozen=True)
class Case:
    """One call of an op. `moved_bytes` or `flops` is its work; `torch_call` does the same by other means."""

    op: str
    dtype: torch.dtype
    arguments: tuple[Any, ...]
    torch_call: Callable[[], Any]
    moved_bytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Row:
    op: str
    dtype: str
    shapes: list[list[int]]
    error: float
    seconds: float
    torch_seconds: float
    faster_than_torch: float
    share_of_copy: float | None
    tflops: float | None


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def row_cases(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """RMSNorm and SwiGLU: work is bytes."""

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    x, dy, w = random(sizes.tokens, sizes.hidden), random(sizes.tokens, sizes.hidden), random(sizes.hidden)
    rstd, acc = random(sizes.tokens, dtype=torch.float32).abs(), random(sizes.hidden, dtype=torch.float32)
    yield reference("rmsnorm", dtype, (x, w, EPS), bytes_of(x, x, w, rstd))
    yield reference("rmsnorm_dgrad", dtype, (dy, x, w, rstd), bytes_of(dy, x, x, w, rstd))
    yield reference("rmsnorm_wgrad_", dtype, (acc, dy, x, rstd), bytes_of(dy, x, rstd))
    h, dy = random(sizes.tokens, 2 * sizes.dense), random(sizes.tokens, sizes.dense)
    yield reference("swiglu", dtype, (h,), bytes_of(h, dy))
    yield reference("swiglu_dgrad", dtype, (dy, h), bytes_of(dy, h, h))
    h, dy, gate = (
        random(sizes.rows, 2 * sizes.inner),
        random(sizes.rows, sizes.inner),
        random(sizes.rows, dtype=torch.float32),
    )
    yield reference("gated_swiglu", dtype, (h, gate), bytes_of(h, dy, gate))
    yield reference("gated_swiglu_dgrad", dtype, (dy, h, gate), bytes_of(dy, h, h, gate, gate))


def reference(op: str, dtype: torch.dtype, arguments: tuple[Any, ...], moved_bytes: int) -> Case:
    """Timed against the reference op in eager torch."""
    return Case(op, dtype, arguments, lambda: ops.OPS[op](*arguments), moved_bytes=moved_bytes)


def grouped_cases(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """The up and down projection of the experts: work is floating point operations.

    `_grouped_mm` is given the rows already sorted by expert, one group an expert: its best case.
    """

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    cuts = torch.randint(sizes.rows + 1, (sizes.sources * sizes.experts - 1,), device=device).sort().values
    offsets = torch.cat([cuts, torch.tensor([sizes.rows], device=device)]).to(torch.int32)
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1)).view(sizes.sources, sizes.experts)
    ends = counts.sum(0).cumsum(0).to(torch.int32)
    for out, inner in ((2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)):
        x, dy, w = random(sizes.rows, inner), random(sizes.rows, out), random(sizes.experts, out, inner)
        acc = random(sizes.experts, out, inner, dtype=torch.float32)
        flops = 2 * sizes.rows * out * inner
        calls: dict[str, tuple[tuple[Any, ...], Callable[[], Any]]] = {
            "grouped_linear": ((x, w, offsets), lambda x=x, w=w: grouped_mm(x, w.transpose(1, 2), ends)),
            "grouped_linear_dgrad": ((dy, w, offsets), lambda dy=dy, w=w: grouped_mm(dy, w, ends)),
            "grouped_linear_wgrad_": ((acc, dy, x, offsets), lambda dy=dy, x=x: grouped_mm(dy.t(), x, ends)),
        }
        for op, (arguments, torch_call) in calls.items():
            yield Case(op, dtype, arguments, torch_call, flops=flops)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped product, which takes BF16 only; else one product an expert with equal shares of the rows."""
    if a.dtype == torch.bfloat16:
        return torch._grouped_mm(a, b, offs=ends)
    experts = len(ends)
    if b.dim() == 2:
        return torch.stack([p @ q for p, q in zip(a.chunk(experts, 1), b.chunk(experts), strict=True)])
    return torch.cat([p @ q for p, q in zip(a.chunk(experts), b, strict=True)])


def emitted(case: Case, num_sms: int, folder: Path) -> Callable[..., Any]:
    described = tuple(
        Buffer("argument", tuple(argument.shape), name_of(argument.dtype)) if isinstance(argument, Tensor) else argument
        for argument in case.arguments
    )
    file = emit_kernel(case.op, described, num_sms)
    assert file
    path = folder / f"{file.name}.py"
    path.write_text(file.source)
    kernel: Callable[..., Any] = vars(load_kernels(path))[case.op]
    return kernel


def error_of(case: Case, kernel: Callable[..., Any]) -> float:
    """The worst relative error, as a share of what its dtype allows, of any result against the op in FP64."""
    exact = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in case.arguments]
    if case.op.endswith("_"):  # adds to its first argument
        acc = case.arguments[0].clone()
        kernel(acc, *case.arguments[1:])
        ops.OPS[case.op](*exact)
        pairs = [(acc, exact[0])]
    else:
        found, expected = kernel(*case.arguments), ops.OPS[case.op](*exact)
        pairs = list(zip(found, expected, strict=True)) if isinstance(found, tuple) else [(found, expected)]
    return max(float((a.double() - b).norm() / b.norm()) / ERROR[a.dtype] for a, b in pairs)


def measure(case: Case, num_sms: int, folder: Path, time: Callable[..., float], copy: float) -> Row:
    """`time` gives seconds of a call; `copy` is the device's bytes a second."""
    kernel = emitted(case, num_sms, folder)
    error = error_of(case, kernel)
    assert error <= 1, f"{case.op}: {error:.3g} times the error its dtype allows"
    seconds, torch_seconds = time(lambda: kernel(*case.arguments)), time(case.torch_call)
    return Row(
        op=case.op,
        dtype=name_of(case.dtype),
        shapes=[list(argument.shape) for argument in case.arguments if isinstance(argument, Tensor)],
        error=error,
        seconds=seconds,
        torch_seconds=torch_seconds,
        faster_than_torch=torch_seconds / seconds,
        share_of_copy=case.moved_bytes / seconds / copy if case.moved_bytes else None,
        tflops=case.flops / seconds / 1e12 if case.flops else None,
    )


def cuda_time(call: Callable[[], Any]) -> float:
    import triton.testing

    milliseconds: float = triton.testing.do_bench(call, warmup=100, rep=400, return_mode="median")
    return milliseconds / 1e3


def main() -> int:
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing was measured and no result was written.")
        return 0
    import triton

    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    source = torch.randn(1 << 28, device="cuda")
    copy = 2 * bytes_of(source) / cuda_time(lambda: source.clone())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.bfloat16, torch.float32):
            for cases in (row_cases, grouped_cases):
                for case in cases(V3, dtype, "cuda"):
                    row = measure(case, properties.multi_processor_count, Path(folder), cuda_time, copy)
                    speed = f"{row.tflops:6.0f} TFLOPS" if row.tflops else f"{row.share_of_copy:6.2f} of copy"
                    times = f"{row.seconds * 1e6:10.1f} µs{row.faster_than_torch:8.2f}× torch"
                    print(f"{row.op:24}{row.dtype:10}{times}  {speed}")
                    rows.append(row)
    result = {
        "device": properties.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_s": copy,
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"kernels-{re.sub(r'[^a-z0-9]+', '-', properties.name.lower())}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
