"""The fixture `ground`: a place for runs with faults, with a finished run without faults. All tests of the folder
share it, as that run takes seconds.
"""

from __future__ import annotations

import pytest

from compiler.emit.segment_cache import Segments
from tests.reliability.struck import Ground
from tests.runtime.run.place import Place


@pytest.fixture(scope="package")
def ground(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> Ground:
    return Ground.made(Place(tmp_path_factory.mktemp("ground"), segments))
