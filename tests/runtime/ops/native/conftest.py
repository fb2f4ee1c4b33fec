"""A test with the fixture `instructions` runs once for each library that this processor can run."""

from __future__ import annotations

import pytest

from tests.runtime.ops.native.paths import LIBRARIES, TORCH


@pytest.fixture(params=LIBRARIES)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ops use the library for these instructions."""
    LIBRARIES[request.param].take(monkeypatch)
    return str(request.param)


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops use no library."""
    TORCH.take(monkeypatch)
