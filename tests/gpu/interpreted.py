"""Checks of the benchmark's tables and kernels, in the process whose kernels are interpreted."""

from __future__ import annotations

from typing import Any

import torch

import tests.compiler.emit.kernels.interpreted  # noqa: F401  its watch over what programs touch, and its rounding
from benchmarks.gpu.checks import check
from benchmarks.gpu.sizes import Make
from benchmarks.gpu.split import quantising_copy
from runtime.ops.quantise import quantise


def kernel(task: dict[str, Any]) -> None:
    answer = check(task, "cpu")
    assert "failed" not in answer, answer


def copy(rows: int, copied: int, columns: int, programs: int) -> None:
    """Copying some rows quantises them; other rows do not change."""
    x_RC = Make(torch.bfloat16, "cpu")(rows, columns)
    x_RC[0, :128] = 0
    q_RC, s_RB = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), torch.full((rows, columns // 128), -1.0)
    quantising_copy(x_RC, q_RC, s_RB, copied, programs)
    q, s = quantise(x_RC[:copied])
    assert torch.equal(s_RB[:copied], s) and (s_RB[copied:] == -1).all()
    assert torch.equal(q_RC[:copied].float(), q.float()) and (q_RC[copied:].float() == 0).all()
