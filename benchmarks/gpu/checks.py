"""Checks every kernel on the GPU against its op, at odd, even and DeepSeek-V3's sizes. A worker of workers.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.sizes import ALL, Make
from benchmarks.gpu.verify import copied, emitted, error, exact, results
from compiler.emit.kernels.libraries import LIBRARIES
from compiler.model.ops.implementations import TRITON
from runtime.system.workers import serve

BY = " by "  # in the name of a task, before that of a library
NUM_SMS_ODD = 7  # so few that persistent programs have several tiles each


def tasks(sizes: str) -> list[dict[str, Any]]:
    """One task per case and dtype, at the sizes of this name."""
    return [
        {"case": index, "name": case.name, "dtype": str(dtype).removeprefix("torch."), "sizes": sizes}
        for index, case in enumerate(CASES)
        for dtype in (case.dtypes[:1] if sizes == "v3" else case.dtypes)
        if sizes == "v3" or sizes in case.sizes
    ]


def library_tasks() -> list[dict[str, Any]]:
    """One task for each library that a run can name and each of its ops, at the sizes of DeepSeek-V3."""
    return [
        {**task, "name": f"{task['name']}{BY}{name}", "library": name}
        for task in tasks("v3")
        for name, library in LIBRARIES.items()
        if CASES[task["case"]].op in library.ops
    ]


def check(task: Mapping[str, Any], device: str) -> dict[str, Any]:
    """{"error": share of the allowed error, …}, or the reason for none."""
    case: Case = CASES[task["case"]]
    assert case.name == task["name"].partition(BY)[0], "the task is from another table of cases"
    started = time.monotonic()
    dtype = getattr(torch, task["dtype"])
    arguments = case.arguments(ALL[task["sizes"]], Make(dtype, device))
    num_sms = NUM_SMS_ODD if task["sizes"] != "v3" else sms(device)
    library = task.get("library", "")
    try:
        kernel = emitted(case.op, arguments, num_sms, library or TRITON)
    except ImportError as missing:
        return {"left_out": f"{missing.name} is not installed"}
    if kernel is None:
        return {"left_out": "the reference op runs at these sizes"}
    first = results(case, kernel, copied(arguments))
    poison = [torch.full((tensor.nbytes,), 255, dtype=torch.uint8, device=device) for tensor in first]
    del poison  # the second run reuses this memory: elements that it does not write are NaN, or wrong
    again = results(case, kernel, copied(arguments))
    equal = all(_equal(a, b) for a, b in zip(first, again, strict=True))
    del again
    worst = error(case, dtype, first, exact(case, arguments))
    answer: dict[str, Any] = {"error": round(worst, 4), "seconds": round(time.monotonic() - started, 2)}
    if not worst <= 1:
        answer["failed"] = f"{worst:.3g} times the allowed error"
    elif not equal and (not library or LIBRARIES[library].is_deterministic):
        answer["failed"] = "a second run gave other bits"
    return answer


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors are bit-identical except for the sign of zero; NaN equals NaN."""
    a, b = (x.float() if x.dtype == torch.float8_e4m3fn else x for x in (a, b))
    return bool(((a == b) | ((a != a) & (b != b))).all())


def sms(device: str) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 4


def handle(task: Mapping[str, Any]) -> dict[str, Any]:
    torch.cuda.empty_cache()
    return check(task, "cuda")


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    sys.exit(serve(handle))
