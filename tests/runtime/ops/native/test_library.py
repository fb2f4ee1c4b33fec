"""Which operands the C++ accepts, and the message if there is no library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.ops import rmsnorm
from runtime.ops.native import compile_cpp, library
from tests.runtime.ops.native.paths import CAPABLE, OWN
from tests.runtime.step.processes import run_module

ROOT = Path(__file__).parents[4]
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, without a library."""
    for source in [*compile_cpp.HERE.glob("*.cpp"), *compile_cpp.HERE.glob("*.h")]:
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(compile_cpp, "HERE", tmp_path)
    monkeypatch.delenv(compile_cpp.ELSEWHERE, raising=False)
    return tmp_path


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True
    )


def test_the_library_is_not_missing(instructions: str) -> None:
    assert library.missing() is None
    assert library.identity() == f"{OWN} {compile_cpp.digest()[:12]}"


def test_reasons_for_a_missing_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "; `python -m runtime.ops.native.compile_cpp` compiles it, or says why not" in str(library.missing())
    binary = compile_cpp.path(CAPABLE[0])
    binary.write_bytes(b"not a library, of the sources " + compile_cpp.digest().encode())
    assert str(library.missing()).startswith("the C++ cannot be loaded: ")
    (folder / "simd.h").write_text("// another line\n" + (folder / "simd.h").read_text("utf-8"), "utf-8")
    assert str(library.missing()).startswith("the C++ was compiled from other sources; ")
    monkeypatch.setenv("DSC_OPS", "torch")
    assert library.missing() == "DSC_OPS is torch; unset it"
    assert library.identity() == "torch"
    monkeypatch.delenv("DSC_OPS")
    monkeypatch.setattr(library, "instructions", lambda: "DEFAULT")
    assert library.missing() == "there is no C++ for a processor with DEFAULT"


def test_new_flags_are_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compile_cpp.digest()
    monkeypatch.setattr(compile_cpp, "FLAGS", (*compile_cpp.FLAGS, "-ffast-math"))
    assert compile_cpp.digest() != before


@pytest.mark.parametrize("capability", ["avx2", *(["avx512"] if "AVX512" in CAPABLE else [])])
def test_torch_is_asked_for_the_instructions(capability: str) -> None:
    """The instruction set is the one that torch uses; BF16 instructions need a processor with AVX-512."""
    code = "from runtime.ops.native import library; print(library.instructions())"
    done = python(code, ATEN_CPU_CAPABILITY=capability)
    assert done.stdout.split()[0] in (["AVX2"] if capability == "avx2" else [OWN])


@pytest.mark.parametrize(("name", "value"), [("DSC_OPS", "torch"), ("ATEN_CPU_CAPABILITY", "default")])
def test_the_environment_turns_it_off(name: str, value: str) -> None:
    code = (
        "import torch; from runtime.ops.native import library;"
        "print(library.runs_natively(torch.zeros(2, 2)), library.identity())"
    )
    assert python(code, **{name: value}).stdout == "False torch\n"


def test_accepted_operands(instructions: str) -> None:
    x, half = torch.zeros(4, 6), torch.zeros(4, 6, dtype=torch.bfloat16)
    accepted: list[tuple[Tensor, ...]] = [(x,), (half, half), (x[:, 2:4], x), (x[:0],), (x.expand(3, 4, 6)[0], x[1])]
    accepted += [(x.to(E4M3), x[1].to(E4M3)), (x[:, 2:4].to(E4M3),)]
    assert all(library.runs_natively(*operands) for operands in accepted)
    refused = [(x.double(),), (x.half(),), (x, half), (half, x), (x.t(),), (x[:, ::2],), (x, x.t()), (x.to("meta"),)]
    refused += [(x.to(E4M3), x), (x.to(E4M3).t(),), (x.to(torch.float8_e5m2),)]
    assert not any(library.runs_natively(*operands) for operands in refused)


def test_wrong_arguments_are_refused_before_the_call(instructions: str) -> None:
    """Wrong numbers or kinds of arguments are refused before any address is read."""
    x, w, y, rstd = torch.ones(2, 3), torch.ones(3), torch.empty(2, 3), torch.empty(2)
    library.call("rmsnorm", torch.float32, 2, 3, x, None, w, 0.0, None, y, rstd)
    assert torch.equal(y, x) and torch.equal(rstd, torch.ones(2))
    with pytest.raises(TypeError):
        library.call("rmsnorm", torch.float32, 2, 3, x, None, w, 0.0, None, y)
    with pytest.raises(AttributeError):
        library.call("rmsnorm", torch.float32, 2, 3, x, None, w, 0.0, None, 4096, rstd)
    with pytest.raises(KeyError):
        library.call("rmsnorm", torch.float64, 2, 3, x, None, w, 0.0, None, y, rstd)


def test_ranks_that_were_forked_use_it(tmp_path: Path) -> None:
    assert library.missing() is None, "this test needs the C++ of the ops"
    run_module("tests.runtime.ops.native.ranks", tmp_path, 2)
    y, _ = rmsnorm(torch.arange(12.0).view(3, 4), torch.ones(4), 1e-6)
    wanted = f"{library.identity()} {y.sum().item()}"
    assert [(tmp_path / f"rank_{rank}").read_text("utf-8") for rank in range(2)] == [wanted] * 2
