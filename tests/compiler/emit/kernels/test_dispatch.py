"""Emitted segments call the reference op on the CPU, and the kernel of the build folder elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime import ops
from runtime.build.kernels import on_cuda

KERNELS = """
import torch
def swiglu(h):
    return torch.full((h.shape[0], h.shape[1] // 2), 7.0)
"""


def test_the_cpu_runs_the_reference_op(tmp_path: Path) -> None:
    op = on_cuda(str(tmp_path / "segments" / "any.py"), "absent", ops.rmsnorm)
    x, w = torch.randn(3, 8), torch.randn(8)
    assert op.__name__ == "rmsnorm"
    for output, expected in zip(op(x, w, 1e-6), ops.rmsnorm(x, w, 1e-6), strict=True):
        assert torch.equal(output, expected)


def test_the_interpreter_runs_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "some.py").write_text(KERNELS)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    op = on_cuda(str(tmp_path / "segments" / "any.py"), "some", ops.swiglu)
    assert torch.equal(op(torch.zeros(2, 6)), torch.full((2, 3), 7.0))
    with pytest.raises(FileNotFoundError):
        on_cuda(str(tmp_path / "segments" / "any.py"), "absent", ops.swiglu)(torch.zeros(2, 6))
    with pytest.raises(KeyError, match="swiglu_dgrad"):
        on_cuda(str(tmp_path / "segments" / "any.py"), "some", ops.swiglu_dgrad)(torch.zeros(2, 3), torch.zeros(2, 6))


def test_the_cpu_never_imports_triton() -> None:
    code = (
        "import sys, torch; from runtime import ops; from runtime.build.kernels import on_cuda;"
        "on_cuda('nowhere/segments/any.py', 'none', ops.swiglu)(torch.zeros(2, 6)); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4], check=False).returncode == 0
