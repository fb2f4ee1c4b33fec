"""Fixtures for places of checkpoint copies and for failing system calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from runtime.checkpoint import durable_files
from runtime.checkpoint.places import CopyPlace, FolderPlace, StorePlace
from tests.runtime.faulty_files import Calls


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[Calls], Calls]:
    def install(calls: Calls) -> Calls:
        monkeypatch.setattr(durable_files, "os", calls)
        return calls

    return install


@pytest.fixture(params=["folder", "memory://", "local://"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> CopyPlace:
    if request.param == "folder":
        return FolderPlace("slow", tmp_path / "slow")
    fsspec.filesystem("memory").store.clear()
    return StorePlace(f"{request.param}/bucket/mine" if request.param == "memory://" else f"local://{tmp_path}/slow")
