"""Overlap of compute and communication: a persistent product on n SMs and a quantising copy on m. A worker.

The product is the emitted grouped product for n SMs; the copy stands for a dispatch, which quantises what it sends.
Timed alone, in sequence, in two streams, and in two green contexts. Overlap efficiency is the time of the longer of the
two alone, divided by the time of both together: 1 if neither slows down the other.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.cases import CASES
from benchmarks.gpu.sizes import ALL, Make
from benchmarks.gpu.verify import emitted
from compiler.emit.kernels.kernel import FUSION
from runtime.system.workers import serve

SPLITS = ((112, 20), (124, 8))  # SMs of the product and of the copy: DeepSeek-V3's, and what newer exchanges need
RUNS = 15
COLUMNS = 7168
Launch = Callable[[], Any]


@triton.jit
def _quantising_copy(  # type: ignore[no-untyped-def]
    x_RC, q_RC, s_RB, rows, COLUMNS: tl.constexpr, TILES: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """Quantise rows to E4M3 with one scale per 128 elements. COLUMNS is a multiple of 128."""
    tile, column = tl.arange(0, TILES), tl.arange(0, 128)
    offsets = tile[:, None] * 128 + column[None, :]
    for r in tl.range(tl.program_id(0), rows, PROGRAMS):
        row = tl.cast(r, tl.int64) * COLUMNS
        x = tl.load(x_RC + row + offsets, mask=offsets < COLUMNS, other=0.0).to(tl.float32)
        peak = tl.max(tl.abs(x), 1)
        scale = tl.where(peak == 0.0, 1.0, peak * (1.0 / 448.0))
        q = tl.clamp(x * (1.0 / scale)[:, None], -448.0, 448.0)
        tl.store(q_RC + row + offsets, q.to(tl.float8e4nv), mask=offsets < COLUMNS)
        tl.store(s_RB + tl.cast(r, tl.int64) * (COLUMNS // 128) + tile, scale, mask=tile < COLUMNS // 128)


@triton.jit
def _where(sm_P, SPIN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the SM of each program. Programs spin for a while, so that the others are placed on other SMs."""
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    total = sm * 0
    for i in tl.range(0, SPIN):
        total += i
    tl.store(sm_P + tl.program_id(0), tl.where(total < 0, -1, sm))


def quantising_copy(x_RC: Tensor, q_RC: Tensor, s_RB: Tensor, rows: int, programs: int) -> None:
    tiles = triton.next_power_of_2(x_RC.shape[1] // 128)
    _quantising_copy[(programs,)](x_RC, q_RC, s_RB, rows, x_RC.shape[1], tiles, programs, num_warps=8, **FUSION)


def sms_of(stream: Any) -> int:
    """The number of SMs that programs of a stream run on."""
    sm_P = torch.full((1024,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        _where[(1024,)](sm_P, 20_000, num_warps=1, **FUSION)
    torch.cuda.synchronize()
    return len(set(sm_P.tolist()))


def both(first: Launch, second: Launch, streams: tuple[Any, Any]) -> float:
    """Seconds until both are done, each in its stream, as the median of RUNS."""
    times = []
    for _ in range(RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000)  # lets the host run ahead of the device
        start.record()
        for stream, launch in zip(streams, (first, second), strict=True):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                launch()
        for stream in set(streams):
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def alone(launch: Launch, stream: Any) -> float:
    return both(launch, lambda: None, (stream, stream))


def green_streams(n: int, m: int) -> tuple[list[Any], tuple[Any, Any]]:
    """(two green contexts, which must be kept alive, a stream of each)."""
    from torch.cuda.green_contexts import GreenContext

    contexts: list[Any] = [GreenContext.create(num_sms=count) for count in (n, m)]
    return contexts, (contexts[0].Stream(), contexts[1].Stream())


def measure(n: int, m: int) -> dict[str, Any]:
    case = next(case for case in CASES if case.name == "grouped_linear up")
    make = Make(torch.bfloat16, "cuda")
    arguments = case.arguments(ALL["v3"], make)
    kernel = emitted(case.op, arguments, n)
    assert kernel is not None
    product: Launch = lambda: kernel(*arguments)  # noqa: E731
    x_RC = make(1 << 16, COLUMNS)
    q_RC, s_RB = torch.empty_like(x_RC, dtype=torch.float8_e4m3fn), make.wide(len(x_RC), COLUMNS // 128)
    streams = (torch.cuda.Stream(), torch.cuda.Stream())
    product_s = alone(product, streams[0])
    trial = 1 << 12
    trial_s = alone(lambda: quantising_copy(x_RC, q_RC, s_RB, trial, m), streams[1])
    rows = min(len(x_RC), max(m, int(trial * product_s / trial_s)))  # takes as long as the product
    copy: Launch = lambda: quantising_copy(x_RC, q_RC, s_RB, rows, m)  # noqa: E731
    product_s, copy_s = alone(product, streams[0]), alone(copy, streams[1])
    result: dict[str, Any] = {
        "product_sms": n,
        "copy_sms": m,
        "rows_copied": rows,
        "product_s": product_s,
        "copy_s": copy_s,
        "copy_bytes_per_s": rows * COLUMNS * 3 / copy_s,
        "serial_s": both(product, copy, (streams[0], streams[0])),
        "two_streams_s": both(product, copy, streams),
    }
    try:
        contexts, green = green_streams(n, m)
        result["granted_sms"] = [sms_of(stream) for stream in green]
        result["green_product_s"], result["green_copy_s"] = alone(product, green[0]), alone(copy, green[1])
        result["green_contexts_s"] = both(product, copy, green)
        del contexts
    except Exception as error:  # its type depends on the version of torch
        result["no_green_contexts"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return result


def tasks() -> list[dict[str, Any]]:
    return [{"product_sms": n, "copy_sms": m, "name": f"{n} + {m} SMs"} for n, m in SPLITS]


def handle(task: Mapping[str, Any]) -> dict[str, Any]:
    return measure(task["product_sms"], task["copy_sms"])


if __name__ == "__main__":
    sys.exit(serve(handle))
