"""The kernels of activations against their ops in Triton's interpreter. The checks are in checks_activation.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiler.emit.kernels import emit_kernel
from compiler.ir import Buffer

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_activation"
OPS = ("gelu", "gelu_tanh", "relu2", "geglu", "geglu_tanh", "clamped_swiglu")

each = pytest.mark.parametrize("op", OPS)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "inner"), [(0, 33), (1, 4), (7, 33), (45, 192), (3, 2500)])
def test_activation(interpret: Interpret, op: str, dtype: torch.dtype, rows: int, inner: int) -> None:
    interpret(CHECKS, "activation", op, dtype, rows, inner)


@each
def test_nan_stays(interpret: Interpret, op: str) -> None:
    interpret(CHECKS, "keeps_nan", op)


@each
def test_each_byte_is_moved_once(interpret: Interpret, op: str) -> None:
    interpret(CHECKS, "moves_each_byte_once", op)


def test_different_constants_give_different_names() -> None:
    """Kernel files of a build with different texts have different names."""
    h = Buffer("h", ("R", 64), "bfloat16")
    constants = (
        (7.0, 1.702, 1.0),
        (7.0, 1.702, 0.0),
        (70.0, 1.702, 1.0),
        (7.0, 1e-7, 1.0),
        (7.0, 1e16, 1.0),
        (7, 1, 1),
    )
    files = [emit_kernel("clamped_swiglu", (h, *numbers), 132) for numbers in constants]
    assert len({file.name for file in files if file}) == len({file.source for file in files if file}) == len(files)
