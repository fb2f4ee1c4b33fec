"""Every test that asks for `instructions` runs once for each library that this processor can run."""

from __future__ import annotations

import pytest

from tests.runtime.ops.native.paths import LIBRARIES, TORCH


@pytest.fixture(params=LIBRARIES)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ops take the library for these."""
    LIBRARIES[request.param].take(monkeypatch)
    return str(request.param)


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops take no library."""
    TORCH.take(monkeypatch)
