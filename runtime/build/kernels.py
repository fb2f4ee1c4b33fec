"""Dispatches an op of an emitted segment: its Triton kernel on CUDA tensors, the reference op on others.

An emitted segment contains

    rmsnorm = on_cuda(__file__, "rmsnorm_d192_float32", rmsnorm)

and calls `rmsnorm` like the op. A kernel file is loaded at its first call. Without CUDA, `on_cuda` returns the
reference op itself, and Triton is never imported. With TRITON_INTERPRET=1 the kernels run on CPU tensors too, in
Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from runtime.build.modules import module_at

Op = Callable[..., Any]


def on_cuda(segment: str, file: str, otherwise: Op) -> Op:
    """Return an op that calls `kernels/<file>.py` if its first argument is on CUDA, else `otherwise`.

    `segment`: path of the calling module, BUILD/segments/<name>.py. The file has a function with the name and the
    arguments of the op. Raises FileNotFoundError at the first call on CUDA if the build has no such file.
    """
    name, build = otherwise.__name__, Path(segment).parents[1]
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not is_interpreted and not torch.cuda.is_available():
        return otherwise

    @functools.cache
    def kernel() -> Op:
        return vars(load_kernels(build / "kernels" / f"{file}.py"))[name]

    @functools.wraps(otherwise)
    def op(first: Tensor, *rest: Any) -> Any:
        if first.is_cuda or is_interpreted:
            return kernel()(first, *rest)
        return otherwise(first, *rest)

    return op


@functools.cache
def load_kernels(path: Path) -> ModuleType:
    """Import the module at `path`, once for all segments, because each module compiles its kernels again.

    For an opened build the verified text is used.
    """
    if verified := module_at(path):
        return verified
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
