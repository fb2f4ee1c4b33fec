"""The gate: what a kernel's sm_90 machine code must show before it is trusted, found without a GPU.

A wrapper of the emitted module is called with meta tensors, its launches are recorded instead of run, and each
is compiled for sm_90 exactly as a launch would be (Triton's own binder specialises the arguments). Then the SASS
is read with the `cuobjdump` of the Triton wheel:

- no spills: STACK:0, no LDL or STL;
- where the kernel multiplies matrices of 16-bit numbers: HGMMA, the warpgroup product, and no HMMA, the old one;
  in FP32 neither, for both would round to TF32;
- shared memory within the 227 KiB a block may have (compiling does not fail above it).
"""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from compiler.kernels.kernel import KernelFile

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 232448  # of one block on sm_90


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of one kernel, its arguments as the wrapper passed them."""

    kernel: JITFunction[Any]
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one kernel compiled to; `failures` is empty if it passed."""

    kernel: str
    registers: int
    shared_bytes: int
    failures: tuple[str, ...]


def gate(file: KernelFile, op: str, arguments: tuple[Any, ...]) -> tuple[Verdict, ...]:
    """A verdict for every launch of `op(*arguments)`; tensors among the arguments are on the meta device."""
    with tempfile.TemporaryDirectory() as folder:
        module = _load(file, Path(folder))
        return tuple(judge(launch) for launch in record(module, op, arguments))


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


def judge(launch: Launch) -> Verdict:
    """Compiles one launch for sm_90 and reads what came out."""
    compiled = _compile(launch)
    usage, instructions = _disassemble(compiled.asm["cubin"])
    failures = []
    if usage["STACK"] or instructions & {"LDL", "STL"}:
        failures.append(f"spills {usage['STACK']} bytes")
    if compiled.metadata.shared > SHARED_BYTES:
        failures.append(f"wants {compiled.metadata.shared} bytes of shared memory of {SHARED_BYTES}")
    products = re.findall(r"tt\.dot .*: tensor<[0-9x]+x(\w+)", compiled.asm["ttir"])
    wanted = {"HGMMA"} if any(dtype in ("bf16", "f16") for dtype in products) else set()
    found = instructions & {"HGMMA", "HMMA"}
    if found != wanted:
        failures.append(f"multiplies {'·'.join(sorted(set(products)))} with {sorted(found)}, not {sorted(wanted)}")
    return Verdict(launch.kernel.fn.__name__, usage["REG"], compiled.metadata.shared, tuple(failures))


class _Recorder:
    """Stands in for a kernel in its module: `kernel[grid](…)` notes the launch."""

    def __init__(self, kernel: JITFunction[Any], launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launches.append(Launch(self.kernel, args, tuple(sorted(options.items()))))


def _load(file: KernelFile, folder: Path) -> ModuleType:
    path = folder / f"{file.name}.py"  # Triton reads the text of a kernel from its file
    path.write_text(file.source)
    spec = importlib.util.spec_from_file_location(file.name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(launch: Launch) -> Any:
    kernel, backend = launch.kernel, make_backend(HOPPER)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.args, **dict(launch.options), debug=False)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=HOPPER, options=parsed.__dict__)


@functools.cache  # 0.4 s each, and the ops of one file share kernels
def _disassemble(cubin: bytes) -> tuple[dict[str, int], frozenset[str]]:
    """(resource usage such as REG and STACK, the instructions that occur)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b([A-Z]+)(?:\[0\])?:(\d+)", text)}
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(\w+)", text, re.MULTILINE)
    assert "REG" in usage and "EXIT" in instructions, "cuobjdump showed no kernel"
    return usage, frozenset(instructions)
