"""Launches of kernels, recorded instead of run: `module.op(*arguments)` is called with tensors on the meta device."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from compiler.emit.kernels.calls import KernelCall, TensorLayout
from compiler.emit.kernels.kernel import KernelFile
from compiler.ir import Buffer


def arguments_of(call: KernelCall, rows: int) -> tuple[Any, ...]:
    """The arguments of a call as it makes them, its tensors on the meta device with `rows` for R."""

    def extent(each: int | str) -> int:
        return each if isinstance(each, int) else -(-rows // int(each.removeprefix("R").removeprefix("/") or 1))

    def tensor(buffer: Buffer, layout: TensorLayout | None) -> torch.Tensor:
        shape, dtype = tuple(map(extent, buffer.shape)), getattr(torch, buffer.dtype)
        if layout is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        strides = tuple(map(extent, layout.strides))
        last = layout.offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return torch.empty(max(0, last + 1), dtype=dtype, device="meta").as_strided(shape, strides, layout.offset)

    parts = zip(call.arguments, call.layouts, strict=True)
    return tuple(tensor(part, layout) if isinstance(part, Buffer) else part for part, layout in parts)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of one kernel, its arguments as the wrapper passed them."""

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

    @property
    def num_descriptors(self) -> int:
        return sum(isinstance(arg, TensorDescriptor) for arg in self.args)

    @property
    def eight_bits(self) -> bool:
        """Whether some of its tensors are E4M3."""
        return any(tensor.dtype == torch.float8_e4m3fn for tensor in self.tensors)

    @property
    def streams_rows(self) -> bool:
        """Whether its tensors and their rows are aligned to 16 bytes, and some rows have 512 bytes: the width of a
        warp's load, 16 bytes per thread. Triton only knows of a view's stride whether 16 divides it."""

        def steps(tensor: torch.Tensor) -> list[int]:
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            return [tensor.data_ptr(), *(tensor.element_size() * (n if step == 1 else step) for n, step in pairs)]

        views = (tensor for tensor in self.tensors if not tensor.is_contiguous())
        strides_align = not any(step % 16 for view in views for step in view.stride() if step > 1)
        widest = max((tensor.shape[-1] * tensor.element_size() for tensor in self.tensors if tensor.dim()), default=0)
        return (
            strides_align and widest >= 512 and not any(step % 16 for tensor in self.tensors for step in steps(tensor))
        )


def load(file: KernelFile, folder: Path) -> ModuleType:
    """The emitted module, from a file in `folder`."""
    path = folder / f"{file.name}.py"  # Triton reads the text of a kernel from its file
    path.write_text(file.source)
    spec = importlib.util.spec_from_file_location(file.name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(module: ModuleType, op: str, arguments: tuple[Any, ...]) -> tuple[Launch, ...]:
    """The launches `module.op(*arguments)` makes, none of them run."""
    launches: list[Launch] = []
    kernels = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    assert kernels, f"{module.__name__} has no compiled kernel; is TRITON_INTERPRET set?"
    try:
        for name, kernel in kernels.items():
            setattr(module, name, _Recorder(kernel, launches))
        getattr(module, op)(*arguments)
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return tuple(launches)


def source_of(launch: Launch, gpu: GPUTarget) -> tuple[Any, dict[str, Any]]:
    """What Triton compiles, specialised for the launch's arguments, and the options it compiles with."""
    kernel, backend = launch.kernel, make_backend(gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.args, **dict(launch.options), debug=False)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes), parsed.__dict__


class _Recorder:
    """Stands in for a kernel in its module: `kernel[grid](…)` notes the launch."""

    def __init__(self, kernel: JITFunction[Any], launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launches.append(Launch(self.kernel, args, tuple(sorted(options.items()))))
