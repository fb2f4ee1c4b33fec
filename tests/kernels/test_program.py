"""The emitted program with its emitted kernels, in Triton's interpreter, against the program with reference ops."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from compiler.build import compile_spec, write_build
from dsl.schema import BUILT_IN, Device, Machine
from tests.training.specs import spec

ROOT = Path(__file__).parents[2]


def run(build: Path, out: Path, interpret: bool) -> dict[str, Tensor]:
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.program", str(build), str(out)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return load_file(out)


def test_a_step_with_kernels_is_a_step_with_reference_ops(tmp_path: Path) -> None:
    small = spec(1, 1, 1, 2).model_copy(
        update={
            "precision": BUILT_IN["fp32"],
            "cluster": spec(1, 1, 1, 2).cluster.model_copy(
                update={"node": Machine(devices=1, device=Device(name="few", memory=4 * 10**9, sms=4))}
            ),
        }
    )
    files = dict(compile_spec(small).files)
    write_build(tmp_path / "build", tuple(files.items()))
    plain = run(tmp_path / "build", tmp_path / "plain.safetensors", interpret=False)
    emitted = run(tmp_path / "build", tmp_path / "emitted.safetensors", interpret=True)
    assert plain.pop("files").item() == 0
    assert emitted.pop("files").item() == sum(name.startswith("kernels/") for name in files), "a kernel file unused"
    assert plain.keys() == emitted.keys()
    for name, expected in plain.items():
        error = (emitted[name] - expected).abs().max().item()
        # sums of at most 72 rows and 61 columns in FP32, in another order: a few units of 2^-24 of the largest element
        assert error <= 2e-5 * max(expected.abs().max().item(), 1e-6), (name, error)
