"""The tests of ops, repeated in processes in which torch and oneDNN run as on older processors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.ops.native.paths import CAPABLE

ROOT = Path(__file__).parents[4]
PROCESSORS = {
    **(
        {"AVX-512F alone": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "DSC_OPS": "torch"}}
        if "AVX512" in CAPABLE  # without it, this would be a newer processor
        else {}
    ),
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE4.1": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
FILES = ("tests/runtime/ops/test_ops.py", "tests/runtime/ops/test_bf16.py", "tests/benchmarks/test_gpu.py")
CHOSEN = "test_op_and_gradients_equal_reference or torch and (test_bf16 or test_the_op_passes_the_check_of_its_kernel)"
CAPABILITY = (
    "import torch; from runtime.ops.native import library;"
    "print(torch.backends.cpu.get_cpu_capability(), library.missing() is None);"
    "a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_ops_keep_their_bounds_on_an_older_processor(processor: str) -> None:
    """Torch's path: the C++ is the same on every processor that has its instructions."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *FILES, "-k", CHOSEN]
    environment = os.environ | PROCESSORS[processor]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


SAID = {"AVX-512F alone": "AVX512 False|AVX2 False", "AVX2": "AVX2 True", "SSE4.1": "DEFAULT False"}


@pytest.mark.parametrize(("processor", "said"), [(name, SAID[name]) for name in PROCESSORS])
def test_the_environment_forces_it(processor: str, said: str) -> None:
    """Torch and oneDNN obey: no BF16 product uses BF16 instructions."""
    environment = os.environ | PROCESSORS[processor] | {"ONEDNN_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CAPABILITY], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert re.search(f"^({said})$", done.stdout, re.MULTILINE)
    assert not re.search("exec,cpu,matmul,[^,]*(avx512_core_bf16|amx)", done.stdout)
