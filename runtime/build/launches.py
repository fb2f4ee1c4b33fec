"""Launches of a build's kernels, recorded on the meta device instead of run, and compiled for a device that need not be
there. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from runtime.contract import KernelArgument, KernelUse, TensorArgument

# Numbers of received rows to compile for. Triton compiles one kernel if 16 divides a size, and another if not. 16
# divides 32768 and its 256 tiles of 128 rows; it divides 32896, but not its 257 tiles; it does not divide 32777. FP8
# rows come in whole tiles.
ROWS = (32768, 32896, 32777)
ROWS_FP8 = ROWS[:2]
E4M3 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of one kernel, with the arguments that its op passed."""

    kernel: JITFunction[Any]
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The name of the kernel function."""
        return str(self.kernel.fn.__name__)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors among the arguments, including those of descriptors."""
        bases = (arg.base if isinstance(arg, TensorDescriptor) else arg for arg in self.args)
        return tuple(base for base in bases if isinstance(base, torch.Tensor))


def rows_of(use: KernelUse) -> tuple[int, ...]:
    """Return the numbers of received rows to compile a call for: one if it has no such rows."""
    tensors = [argument for argument in use.arguments if isinstance(argument, TensorArgument)]
    if not any(extent.has_rows for tensor in tensors for extent in tensor.shape):
        return ROWS[:1]
    return ROWS_FP8 if any(tensor.dtype == E4M3 for tensor in tensors) else ROWS


def arguments_of(use: KernelUse, rows: int) -> tuple[Any, ...]:
    """Return the arguments of a call with `rows` for R, its tensors on the meta device."""
    return tuple(_argument(argument, rows) for argument in use.arguments)


def _argument(argument: KernelArgument, rows: int) -> Any:
    if not isinstance(argument, TensorArgument):
        return argument
    shape, dtype = tuple(extent.at(rows) for extent in argument.shape), getattr(torch, argument.dtype)
    if not argument.strides:
        return torch.empty(shape, dtype=dtype, device="meta")
    strides = tuple(extent.at(rows) for extent in argument.strides)
    last = argument.offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat = torch.empty(max(0, last + 1), dtype=dtype, device="meta")
    return flat.as_strided(shape, strides, argument.offset)


def record(module: ModuleType, op: str, arguments: tuple[Any, ...]) -> tuple[Launch, ...]:
    """Return the launches that `module.op(*arguments)` makes. None of them runs. `module`: an emitted kernel file."""
    launches: list[Launch] = []
    kernels = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    assert kernels, f"{module.__name__} has no compiled kernel; is TRITON_INTERPRET set?"
    try:
        for name, kernel in kernels.items():
            setattr(module, name, _LaunchRecorder(kernel, launches))
        getattr(module, op)(*arguments)
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return tuple(launches)


class _LaunchRecorder:
    """Replaces a kernel in its module: `kernel[grid](…)` records the launch."""

    def __init__(self, kernel: JITFunction[Any], launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launches.append(Launch(self.kernel, args, tuple(sorted(options.items()))))


def compile_all(launches: Iterable[Launch]) -> Iterator[str]:
    """Compile launches as their first run would, for the target of `use_target`. Yields the folder of each in Triton's
    cache."""
    for launch in launches:
        kernel = launch.kernel.warmup(*launch.args, grid=(1,), **dict(launch.options))
        if launcher := getattr(driver.active, "launcher_cls", None):
            launcher(kernel.src, kernel.metadata)  # on Triton 3.6, C code that is compiled for each signature
        yield Path(get_cache_manager(kernel.hash).cache_dir).name


def use_target(target: GPUTarget) -> None:
    """Have Triton compile for `target` in this process, without a context on a device."""
    stand_in: Any = driver.default if torch.cuda.is_available() else SimpleNamespace()
    stand_in.get_current_target = lambda: target
    stand_in.get_current_device = lambda: 0
    stand_in.get_current_stream = lambda _device: 0
    driver.set_active(stand_in)
