"""What the tests of one session share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def codes() -> dict[Any, Any]:
    """Segments traced so far."""
    return {}
