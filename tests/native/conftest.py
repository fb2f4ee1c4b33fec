"""Every test that asks for `instructions` runs once for each library that this processor can run."""

from __future__ import annotations

import pytest

from runtime.native import build, library

# Of the instructions, newest first, what the processor has: from its own on.
OWN = library.instructions()
CAPABLE = [*build.VARIANTS][[*build.VARIANTS].index(OWN) :] if OWN in build.VARIANTS else ["AVX2"]


@pytest.fixture(params=CAPABLE)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ops take the library for these."""
    problem = build.build()
    assert problem is None, f"these tests need the C++ of the ops, for an x86-64 processor with AVX2: {problem}"
    functions = library.functions(request.param)
    monkeypatch.setattr(library, "_functions", lambda: functions)
    return str(request.param)


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops take no library."""
    monkeypatch.setattr(library, "_functions", dict)
