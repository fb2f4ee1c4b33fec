"""What the tests of one session share."""

from __future__ import annotations

import pytest

from compiler.emit.segment_cache import Segments


@pytest.fixture(scope="session")
def segments() -> Segments:
    """Segments traced so far."""
    return Segments()
