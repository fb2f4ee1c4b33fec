"""The kernels of residual streams pass the gate at the sizes of DeepSeek-V4-Flash. benchmarks/results/kernels.json has
those of -Pro, and `make kernels` those of every target.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.sizes import V3, Make
from compiler.emit.kernels import emit_kernel
from tests.compiler.emit.kernels.gate import SM_90, SM_100, Gate, Target
from tests.compiler.emit.kernels.shapes import describe

STREAMS = [case for case in CASES if case.op.startswith(("hyper_", "scale_parts"))]


@pytest.mark.parametrize("target", [SM_90, SM_100], ids=lambda target: target.name)
@pytest.mark.parametrize("case", STREAMS, ids=lambda case: case.name)
def test_passes_the_gate(case: Case, target: Target) -> None:
    arguments = case.arguments(replace(V3, hidden=4096), Make(case.dtypes[0], "meta"))
    file = emit_kernel(case.op, describe(arguments), 132)
    assert file
    verdicts = Gate(target).verdicts(file, case.op, arguments)
    assert verdicts and not any(verdict.failures for verdict in verdicts), verdicts
