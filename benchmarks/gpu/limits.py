"""Timing on a GPU, and the limits of the device: a plain copy, and cuBLAS products. On random numbers, as zeros are
faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SHORT_S = 200e-6
WARM_UP_MS, REPEAT_MS = 10, 50


def seconds(call: Callable[[], Any]) -> float:
    """The median time of a call, with L2 flushed before each."""
    import triton.testing

    milliseconds: float = triton.testing.do_bench(call, warmup=WARM_UP_MS, rep=REPEAT_MS, return_mode="median")
    return milliseconds / 1e3


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph | None:
    """Capture a call as a CUDA graph. None if it cannot be captured, for example because it reads numbers back."""
    if waits(call):
        return None
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            call()
    except Exception:  # of any kind: torch's, Triton's, CUDA's
        torch.cuda.synchronize()
        return None
    return graph


def waits(call: Callable[[], Any]) -> bool:
    """Whether a call makes the host wait for the device, which would break a capture."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def in_turn(calls: dict[str, Callable[[], Any]], rounds: int = 3) -> dict[str, float]:
    """Seconds of each call, as medians of interleaved rounds (A B C A B C), so that thermal effects hit all calls.

    A short call is also timed as a replay of its graph, and the shorter time counts, because its launches may take
    longer than its kernels.
    """
    times_of: dict[str, list[float]] = {name: [] for name in calls}
    graphs: dict[str, torch.cuda.CUDAGraph | None] = {}
    for _ in range(rounds):
        for name, call in calls.items():
            once = seconds(call)
            if once < SHORT_S and name not in graphs:
                graphs[name] = captured(call)
            graph = graphs.get(name)
            times_of[name].append(once if graph is None else min(once, seconds(graph.replay)))
    return {name: sorted(times)[len(times) // 2] for name, times in times_of.items()}


def limits() -> dict[str, float]:
    """bytes/s of a copy (read plus written), FLOP/s of BF16 and E4M3 products."""
    rates = {"copy": _copy()}
    extent = 8192
    a, b = (torch.randn(extent, extent, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * extent**3
    rates["bf16"] = flops / seconds(lambda: a @ b)
    a8, b8, scale = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    rates["fp8"] = flops / seconds(
        lambda: torch._scaled_mm(a8, b8.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    )
    return rates


def _copy() -> float:
    source, target = torch.randn(1 << 28, device="cuda"), torch.empty(1 << 28, device="cuda")
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))
