"""Times every kernel at DeepSeek-V3's sizes, the limits of the machine, and other implementations. A worker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.gpu.arguments import reference
from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.checks import BY, sms
from benchmarks.gpu.libraries import PEERS
from benchmarks.gpu.limits import in_turn, limits
from benchmarks.gpu.peers import FORMULAS
from benchmarks.gpu.sizes import ALL, Make
from benchmarks.gpu.verify import copied, emitted, moved_bytes, results
from compiler.emit.kernels.libraries import LIBRARIES
from runtime.system.workers import serve

TORCH, COMPILED = "torch", "compiled"
SLOW_S = 0.3  # peers slower than this are timed once


def tasks() -> list[dict[str, Any]]:
    """The machine's limits, then kernels compared with libraries, then with eager and compiled torch."""
    numbered = list(enumerate(CASES))
    libraries = [{"kind": "libraries", "case": i, "name": case.name} for i, case in numbered]
    compiled = [{"kind": "compiled", "case": i, "name": case.name} for i, case in numbered if case.op in FORMULAS]
    return [{"kind": "limits"}, *libraries, *compiled]


def handle(task: Mapping[str, Any]) -> dict[str, Any]:
    torch.cuda.empty_cache()
    return limits() if task["kind"] == "limits" else timed(task)


def timed(task: Mapping[str, Any], sizes: str = "v3", device: str = "cuda") -> dict[str, Any]:
    """Seconds of our kernel and of the others, the work, and the reasons why others have no time."""
    case = CASES[task["case"]]
    assert case.name == task["name"], "the task is from another table of cases"
    arguments = case.arguments(ALL[sizes], Make(case.dtypes[0], device))
    if task["kind"] == "warm":
        torch.compile(FORMULAS[case.op], dynamic=False)(*copied(arguments))
        return {}
    kernel = emitted(case.op, arguments, sms(device))
    if kernel is None:
        return {"left_out": "the reference op runs at these sizes"}
    calls: dict[str, Callable[[], Any]] = {"ours": lambda: kernel(*arguments)}
    slow, why_not = {}, {}
    wanted = _libraries(case, arguments) if task["kind"] == "libraries" else _formula(case, arguments)
    for name, make in wanted.items():
        try:
            call = make()
            if (once := first(call)) > SLOW_S:
                slow[name] = once
            else:
                calls[name] = call
        except Exception as error:  # a failing peer does not stop the others
            why_not[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    times = in_turn(calls)
    moved = moved_bytes(case, ALL[sizes], arguments, results(case, kernel, copied(arguments)))
    flops = case.flops(ALL[sizes]) if case.flops else None
    return {"seconds": times | slow, "bytes": moved, "flops": flops, "rate": case.rate, "why_not": why_not}


def first(call: Callable[[], Any]) -> float:
    """Seconds of the second call; the first may compile."""
    call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


Calls = dict[str, Callable[[], Callable[[], Any]]]


def _formula(case: Case, arguments: tuple[Any, ...]) -> Calls:
    formula = FORMULAS[case.op]
    compiled = torch.compile(formula, dynamic=False)
    return {
        "written in torch": lambda: lambda: formula(*arguments),
        COMPILED: lambda: lambda: compiled(*arguments),
    }


def _libraries(case: Case, arguments: tuple[Any, ...]) -> Calls:
    def peer(make: Callable[..., Callable[[], Any]]) -> Callable[[], Callable[[], Any]]:
        return lambda: make(*copied(arguments))

    def named(library: str) -> Callable[[], Callable[[], Any]]:
        """The text that a run with this library in `kernels` calls."""

        def make() -> Callable[[], Any]:
            text = emitted(case.op, arguments, sms(arguments[0].device.type), library)
            assert text is not None
            return lambda: text(*arguments)

        return make

    eager = {TORCH: lambda: lambda: reference(case.op)(*arguments)}
    libraries = {f"{BY.strip()} {name}": named(name) for name, entry in LIBRARIES.items() if case.op in entry.ops}
    return eager | libraries | {name: peer(make) for name, make in PEERS.get(case.op, {}).items()}


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    sys.exit(serve(handle))
