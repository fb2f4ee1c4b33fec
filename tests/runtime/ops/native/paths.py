"""The paths that an op may take on a CPU, all tested against the same bounds on one machine.

A path is a C++ library, or only torch, and whether torch multiplies BF16 with instructions of the processor. The
libraries for older processors run on a newer one. Choices of torch and oneDNN by processor are forced by the
environment of a process (tests/runtime/ops/native/test_forced.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from runtime.ops import product
from runtime.ops.native import compile_cpp, library

# The instruction sets that the processor has, newest first.
OWN = library.instructions()
CAPABLE = [*compile_cpp.VARIANTS][[*compile_cpp.VARIANTS].index(OWN) :] if OWN in compile_cpp.VARIANTS else ["AVX2"]


@dataclass(frozen=True)
class Path:
    """The implementation of ops."""

    library: str | None  # a key of compile_cpp.VARIANTS, or None for only torch
    has_bf16: bool

    def take(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run ops of this process on this path until the test ends."""
        functions: library.Functions = {}
        if self.library is not None:
            problem = compile_cpp.build()
            assert problem is None, f"these tests need the C++ of the ops, for an x86-64 processor with AVX2: {problem}"
            functions = library.functions(self.library)
        monkeypatch.setattr(library, "_functions", lambda: functions)
        monkeypatch.setattr(product, "has_bf16", lambda: self.has_bf16)


TORCH = Path(None, has_bf16=False)
LIBRARIES: Mapping[str, Path] = {
    instructions: Path(instructions, has_bf16=instructions == "AVX512_BF16") for instructions in CAPABLE
}
PATHS: Mapping[str, Path] = {
    **LIBRARIES,
    **({"AVX512 and AMX": Path("AVX512", has_bf16=True)} if "AVX512" in CAPABLE else {}),
    "torch": TORCH,
    "torch with BF16": Path(None, has_bf16=True),
}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A test with this fixture runs once on each path."""
    chosen = PATHS[request.param]
    chosen.take(monkeypatch)
    return chosen
