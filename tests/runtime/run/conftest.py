"""Fixtures for folders to run `dsc` in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compiler.emit.segment_cache import Segments
from tests.runtime.run.place import Place


@pytest.fixture
def place(tmp_path: Path, segments: Segments) -> Place:
    return Place(tmp_path, segments)


@pytest.fixture(scope="module")
def new_place(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> Callable[[], Place]:
    return lambda: Place(tmp_path_factory.mktemp("place"), segments)
