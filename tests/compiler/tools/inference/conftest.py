"""A run of four ranks that `dsc train` has trained, for the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.emit.segment_cache import Segments
from tests.runtime.run.place import FOUR_RANKS, Place


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> Path:
    """The run's folder: a tiny DeepSeek-V3 after 6 steps, with checkpoints of steps 3 and 6 and a moving average."""
    place = Place(tmp_path_factory.mktemp("place"), segments)
    place.compile(FOUR_RANKS | {"more": "ema { decay = 0.5 }"})
    place.dsc("train", "build/tiny", "--data", ".")
    return place.folder / "runs" / "tiny"
