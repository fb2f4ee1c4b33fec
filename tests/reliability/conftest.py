"""The ground on which faults meet runs: one for all tests of a folder, for its undisturbed run takes seconds."""

from __future__ import annotations

import pytest

from compiler.emit.segment_cache import Segments
from tests.reliability.struck import Ground
from tests.runtime.run.place import Place


@pytest.fixture(scope="package")
def ground(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> Ground:
    return Ground.made(Place(tmp_path_factory.mktemp("ground"), segments))
