"""Which code runs an op of an emitted segment: its Triton kernel on CUDA tensors, the reference op on all others.

An emitted segment says

    rmsnorm = on_cuda(BUILD, "rmsnorm_d192_float32", ops.rmsnorm)

and calls `rmsnorm` as it would the op. A kernel file is loaded at its first call, so that a machine without CUDA
never imports Triton. Under TRITON_INTERPRET=1 the kernels run on CPU tensors too, in Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

Op = Callable[..., Any]


def on_cuda(build: Path, file: str, otherwise: Op) -> Op:
    """The op `otherwise`, whose first argument is a tensor, with `build/kernels/<file>.py` in its place on CUDA.

    The file holds a function named and called like the op. Raises FileNotFoundError at the first call on CUDA if
    the build folder has no such file.
    """
    name = otherwise.__name__
    everywhere = os.environ.get("TRITON_INTERPRET") == "1"

    @functools.cache
    def kernel() -> Op:
        return vars(load_kernels(build / "kernels" / f"{file}.py"))[name]

    @functools.wraps(otherwise)
    def op(first: Tensor, *rest: Any) -> Any:
        if first.is_cuda or everywhere:
            return kernel()(first, *rest)
        return otherwise(first, *rest)

    return op


@functools.cache
def load_kernels(path: Path) -> ModuleType:
    """The module at `path`, one for all segments that share it: each module compiles its kernels anew."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
