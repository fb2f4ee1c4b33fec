"""Places to run `dsc` in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compiler.ir import SegmentCode
from tests.runs.place import Place


@pytest.fixture(scope="session")
def codes() -> dict[object, SegmentCode]:
    """Segments traced so far: the specs of these tests share most of them."""
    return {}


@pytest.fixture
def place(tmp_path: Path, codes: dict[object, SegmentCode]) -> Place:
    return Place(tmp_path, codes)


@pytest.fixture(scope="module")
def new_place(tmp_path_factory: pytest.TempPathFactory, codes: dict[object, SegmentCode]) -> Callable[[], Place]:
    return lambda: Place(tmp_path_factory.mktemp("place"), codes)
