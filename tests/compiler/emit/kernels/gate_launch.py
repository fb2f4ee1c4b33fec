"""The launches of a kernel call, and what Triton compiles for them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from compiler.emit.kernels.calls import KernelCall, use_of
from compiler.emit.kernels.kernel import KernelFile
from runtime.build import launches
from runtime.build.launches import Launch


def arguments_of(call: KernelCall, rows: int) -> tuple[Any, ...]:
    """The arguments of a call, its tensors on the meta device with `rows` for R."""
    return launches.arguments_of(use_of("", call), rows)


def num_descriptors(launch: Launch) -> int:
    return sum(isinstance(arg, TensorDescriptor) for arg in launch.args)


def has_eight_bits(launch: Launch) -> bool:
    """Whether some tensors of a launch are E4M3."""
    return any(tensor.dtype == torch.float8_e4m3fn for tensor in launch.tensors)


def streams_rows(launch: Launch) -> bool:
    """Whether the tensors of a launch and their rows are aligned to 16 bytes, and some rows have 512 bytes: the width
    of a warp's load, 16 bytes per thread. Triton only knows of a view's stride whether 16 divides it."""

    def steps(tensor: torch.Tensor) -> list[int]:
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        return [tensor.data_ptr(), *(tensor.element_size() * (n if step == 1 else step) for n, step in pairs)]

    views = (tensor for tensor in launch.tensors if not tensor.is_contiguous())
    strides_align = not any(step % 16 for view in views for step in view.stride() if step > 1)
    widest = max((tensor.shape[-1] * tensor.element_size() for tensor in launch.tensors if tensor.dim()), default=0)
    return strides_align and widest >= 512 and not any(step % 16 for tensor in launch.tensors for step in steps(tensor))


def load(file: KernelFile, folder: Path) -> ModuleType:
    """The emitted module, from a file in `folder`."""
    path = folder / f"{file.name}.py"  # Triton reads the text of a kernel from its file
    path.write_text(file.source)
    spec = importlib.util.spec_from_file_location(file.name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_of(launch: Launch, gpu: GPUTarget) -> tuple[Any, dict[str, Any]]:
    """What Triton compiles, specialised for the launch's arguments, and the options it compiles with."""
    kernel, backend = launch.kernel, make_backend(gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.args, **dict(launch.options), debug=False)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes), parsed.__dict__
