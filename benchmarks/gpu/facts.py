"""Resources of the machine code of every kernel at DeepSeek-V3's sizes, found by the gate without a GPU."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import triton

from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.sizes import ALL, Make
from benchmarks.gpu.verify import describe
from compiler.emit.kernels import KernelFile, emit_kernel
from tests.compiler.emit.kernels.gate import Gate, Verdict

NUM_SMS = 132


def facts(before: Mapping[str, Any]) -> dict[str, Any]:
    """The digest of the text and one row per launch on sm_90, for each case. Rows of unchanged texts are reused from
    `before`."""
    gate = Gate()
    stored = before.get("cases", {}) if before.get("triton") == triton.__version__ else {}
    cases: dict[str, Any] = {}
    for case in CASES:
        file, arguments = emitted(case)
        if file is None:
            cases[case.name] = {"text": "", "launches": []}
            continue
        if stored.get(case.name, {}).get("text") == digest(file):
            cases[case.name] = stored[case.name]
            continue
        print(case.name, file=sys.stderr, flush=True)
        verdicts = gate.verdicts(file, case.op, arguments)
        cases[case.name] = {"text": digest(file), "launches": [row(verdict) for verdict in verdicts]}
    return {"triton": triton.__version__, "target": "sm_90", "cases": cases}


def emitted(case: Case) -> tuple[KernelFile | None, tuple[Any, ...]]:
    """(the kernel file of a case, if it has one, the arguments as meta tensors)."""
    arguments = case.arguments(ALL["v3"], Make(case.dtypes[0], "meta"))
    return emit_kernel(case.op, describe(arguments), NUM_SMS), arguments


def digest(file: KernelFile | None) -> str:
    return "" if file is None else hashlib.sha256(file.source.encode()).hexdigest()[:16]


def row(verdict: Verdict) -> dict[str, Any]:
    return {
        "kernel": verdict.kernel,
        "registers": verdict.registers,
        "shared_bytes": verdict.shared_bytes,
        "threads": verdict.threads,
        "programs": verdict.programs,
        "load_bytes": verdict.load_bytes,
        "idle": verdict.idle,
        "instructions": list(verdict.instructions),
        "failures": list(verdict.failures),
    }
