"""The paths that an op may take on a CPU, all of which are held to the same bounds on one machine.

A path is a library in C++, or torch alone, and whether torch multiplies BF16 by instructions of the processor. The
libraries for older processors run on a newer one. What torch and oneDNN choose by the processor is forced by the
environment of a process (tests/runtime/ops/native/test_forced.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from runtime.ops import product
from runtime.ops.native import compile_cpp, library

# Of the instructions, newest first, what the processor has: from its own on.
OWN = library.instructions()
CAPABLE = [*compile_cpp.VARIANTS][[*compile_cpp.VARIANTS].index(OWN) :] if OWN in compile_cpp.VARIANTS else ["AVX2"]


@dataclass(frozen=True)
class Path:
    """What ops run on."""

    library: str | None  # a key of compile_cpp.VARIANTS, or None for torch alone
    has_bf16: bool

    def take(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ops of this process run on this path until the test ends."""
        functions: library.Functions = {}
        if self.library is not None:
            problem = compile_cpp.build()
            assert problem is None, f"these tests need the C++ of the ops, for an x86-64 processor with AVX2: {problem}"
            functions = library.functions(self.library)
        monkeypatch.setattr(library, "_functions", lambda: functions)
        monkeypatch.setattr(product, "has_bf16", lambda: self.has_bf16)


TORCH = Path(None, has_bf16=False)
LIBRARIES: Mapping[str, Path] = {each: Path(each, has_bf16=each == "AVX512_BF16") for each in CAPABLE}
PATHS: Mapping[str, Path] = {
    **LIBRARIES,
    **({"AVX512 and AMX": Path("AVX512", has_bf16=True)} if "AVX512" in CAPABLE else {}),
    "torch": TORCH,
    "torch with BF16": Path(None, has_bf16=True),
}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A test that asks for it runs once on each path."""
    chosen = PATHS[request.param]
    chosen.take(monkeypatch)
    return chosen
