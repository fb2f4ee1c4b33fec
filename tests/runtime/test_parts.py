"""Reduce-scatter and all-gather over every transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.step.processes import run_module


@pytest.mark.parametrize("world", [2, 3])
def test_every_transport(tmp_path: Path, world: int) -> None:
    run_module("tests.runtime.parts", tmp_path, world)
