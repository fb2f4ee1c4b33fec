"""The interpreter's checks of kernels, run on a GPU: `python -m pytest -p tests.gpu.plugin
tests/compiler/emit/kernels`.

Only the tests that use the fixture `interpret` run, without those of the interpreter itself. Their checks run in this
process, on CUDA tensors, with compiled kernels, and within the same bounds as in the interpreter. Without a GPU they
are interpreted, in this process.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

CHECKS = "tests.compiler.emit.kernels.interpreted"
DESCRIBED = "tests.compiler.emit.kernels.shapes"
OF_THE_INTERPRETER = ("tests.compiler.emit.kernels.faulty",)  # and other uses of its access checks


def pytest_configure() -> None:
    import torch

    stand_in()
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported


def stand_in() -> None:
    """Replaces the module by which checks describe tensors if the packages that the compiler needs are missing."""
    if find_spec("pydantic") is not None and find_spec("lark") is not None:
        return
    from benchmarks.gpu.verify import describe

    stand_in = ModuleType(DESCRIBED)
    stand_in.describe = describe  # type: ignore[attr-defined]
    sys.modules[DESCRIBED] = stand_in


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if "interpret" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Any:
    """Replaces the process whose kernels are interpreted."""
    if fixturedef.argname != "interpret":
        return None
    fixturedef.cached_result = (run, fixturedef.cache_key(request), None)
    return run


def run(module: str, name: str, *arguments: Any) -> None:
    if module in OF_THE_INTERPRETER:
        pytest.skip("of the interpreter")
    load()
    getattr(importlib.import_module(module), name)(*arguments)


@functools.cache
def load() -> None:
    """The module with the checks' helpers, changed to create tensors on the device."""
    import torch

    if not torch.cuda.is_available():
        return
    import triton.language  # noqa: F401  it asks once whether to interpret, where a function of it is defined: not

    os.environ["TRITON_INTERPRET"] = "1"  # requirements of the module
    checks = importlib.import_module(CHECKS)
    del os.environ["TRITON_INTERPRET"]
    torch.set_default_device("cuda")
    make_random: Callable[..., Any] = checks.random

    def random(*shape: int, **more: Any) -> Any:
        with torch.device("cpu"):
            return make_random(*shape, **more).cuda()

    checks.random = random  # type: ignore[attr-defined]
