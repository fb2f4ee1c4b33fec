"""No function reads outside an operand or writes outside a result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import progress
from tests.runtime.ops.native.guarded import Fenced, fenced_call

ROOT = Path(__file__).parents[4]


def run(*code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, *code], os.environ | environment
    return progress.run(command, ROOT, env)


def test_every_function_keeps_to_its_operands(instructions: str) -> None:
    """Functions stay within their operands and read no uninitialized memory: glibc's fill bytes change no result."""
    results = set()
    for filled in ("0", "128"):
        done = run("-m", "tests.runtime.ops.native.guarded", instructions, MALLOC_PERTURB_=filled)
        last = (done.stdout.splitlines() or [""])[-1]
        assert done.returncode == 0 and last.startswith("done "), (
            f"exit code {done.returncode} in {last}\n{done.stderr}"
        )
        results.add(last)
    assert len(results) == 1


@pytest.mark.parametrize(
    ("at_end", "one_too_far"), [(True, "each.copy[-1].data_ptr() + 4"), (False, "each.copy.data_ptr() - 4")]
)
def test_the_fence_stops_accesses_beyond_an_operand(at_end: bool, one_too_far: str) -> None:
    code = "import ctypes, torch; from tests.runtime.ops.native.guarded import Fenced\n"
    code += f"each = Fenced.of(torch.zeros(5), {at_end})\n"
    assert run("-c", f"{code}ctypes.c_float.from_address(each.copy.data_ptr()).value").returncode == 0
    assert run("-c", f"{code}ctypes.c_float.from_address({one_too_far}).value").returncode == -11


def test_the_fence_shows_writes_between_rows() -> None:
    view = torch.zeros(3, 6)[:, 1:4]
    fenced = Fenced.of(view, at_end=True)
    assert torch.equal(fenced.copy, view) and fenced.others.sum() == len(fenced.all) - 4 * 9
    fenced.copy.as_strided((2, 4), (6, 1), fenced.copy.storage_offset())[0, 3] = 1.0
    assert not (fenced.all[fenced.others] == 0xA5).all()


def test_a_write_beside_a_result_is_reported(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(*args: object) -> None:
        result = args[-1]
        assert isinstance(result, torch.Tensor)
        result.as_strided((6,), (1,), result.storage_offset()).fill_(1.0)

    monkeypatch.setattr("runtime.ops.native.library.call", careless)
    with pytest.raises(AssertionError, match="wrote beside"):
        fenced_call(False, "rmsnorm", torch.float32, torch.zeros(5))
