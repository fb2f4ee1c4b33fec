"""The tools of the checks: the interpreter rounds as the hardware does, and races and stray accesses are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

FAULTS = "tests.compiler.emit.kernels.faulty"


@pytest.mark.parametrize("name", ["bf16_casts", "bf16_arithmetic", "bf16_products"])
def test_the_interpreter_rounds(interpret: Callable[..., Any], name: str) -> None:
    interpret(FAULTS, name)


@pytest.mark.parametrize(
    "name",
    ["two_writers", "writer_and_reader", "outside", "masked", "atomics", "queues", "swaps", "words", "descriptors"],
)
def test_the_watch_finds(interpret: Callable[..., Any], name: str) -> None:
    interpret(FAULTS, name)
