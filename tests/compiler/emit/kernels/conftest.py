"""The fixture `interpret`: runs checks of a module in the one process whose kernels are interpreted."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.compiler.emit.kernels import worker


@pytest.fixture(scope="session")
def interpret() -> Iterator[Callable[..., Any]]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=worker.start) as pool:
        yield lambda *arguments: pool.submit(worker.call, *arguments).result()
