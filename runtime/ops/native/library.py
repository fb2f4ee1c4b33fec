"""Finds and calls the C++ library for this machine: the operands it takes, and its functions by name and dtype."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from ctypes import CDLL, c_float, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from runtime.ops.native import compile_cpp

Functions = Mapping[tuple[str, torch.dtype], tuple[Callable[..., None], str]]  # and the signature of each

OFF = "DSC_OPS"  # =torch: ops run on torch
DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "e4m3",
    torch.uint8: "e2m1",  # two per byte
}
# ROWS: a matrix that may be a view of columns, followed by its row stride; MATRIX: followed by both of its strides
NUMBER, FLOAT, TENSOR, ROWS, MATRIX = "nfprm"
TYPES = {
    NUMBER: (c_long,),
    FLOAT: (c_float,),
    TENSOR: (c_void_p,),
    ROWS: (c_void_p, c_long),
    MATRIX: (c_void_p, c_long, c_long),
}
DECLARATION = re.compile(rf'extern "C" void (\w+?)_(?:##suffix|{"|".join(DTYPES.values())})\(([^)]*)\)')


def signatures() -> dict[str, str]:
    """Return the argument kinds of every C++ function, parsed from its declaration.

    `long` is a NUMBER and `float` a FLOAT. A pointer is a TENSOR; followed by one number with `stride` in its name it
    is ROWS, followed by two a MATRIX.
    """
    kinds_by_name: dict[str, str] = {}
    for source in sorted(compile_cpp.HERE.glob("*.cpp")):
        text = source.read_text("utf-8").replace("\\\n", "")
        for name, arguments in DECLARATION.findall(text):
            kinds = ""
            for argument in arguments.split(","):
                if "stride" in argument:
                    kinds = kinds[:-1] + {TENSOR: ROWS, ROWS: MATRIX}[kinds[-1]]
                elif "*" in argument:
                    kinds += TENSOR
                else:
                    kinds += {"long": NUMBER, "float": FLOAT}[argument.split()[0]]
            kinds_by_name[name] = kinds
    return kinds_by_name


def runs_natively(*operands: Tensor) -> bool:
    """Whether an op on these operands runs in C++: CPU tensors of one dtype of `DTYPES` with contiguous rows."""
    if not _functions():
        return False
    dtype = operands[0].dtype
    return dtype in DTYPES and all(x.is_cpu and x.dtype == dtype and x.stride(-1) == 1 for x in operands)


def multiplies_natively(a: Tensor, b: Tensor) -> bool:
    """Whether products of two such matrices run in C++. Either may be transposed."""
    compiled = ("product", a.dtype) in _functions() and a.dtype == b.dtype
    return compiled and a.is_cpu and 1 in a.stride() and 1 in b.stride()


def call(name: str, dtype: torch.dtype, *args: Tensor | float | None) -> None:
    """Call a C++ function for operands of `dtype`; for an optimizer update, the dtype of the moments. Tensors that must
    be contiguous are copied if they are not."""
    function, signature = _functions()[name, dtype]
    values: list[float | None] = []
    copies = []  # kept alive until the function has returned
    for kind, arg in zip(signature, args, strict=True):
        if isinstance(arg, Tensor):
            if kind == TENSOR:
                arg = arg.contiguous()
                copies.append(arg)
            values.append(arg.data_ptr())
            if kind == ROWS:
                values.append(arg.stride(0))
            elif kind == MATRIX:
                values += arg.stride()
        else:
            values.append(arg)
    function(*values)


def missing() -> str | None:
    """Return why all ops run on torch, and how to fix it; None if they run in C++."""
    if chosen := os.environ.get(OFF):
        return f"{OFF} is {chosen}; unset it"  # also for an unknown value, which was meant to change something
    if instructions() not in compile_cpp.VARIANTS:
        return f"there is no C++ for a processor with {instructions()}"
    library = compile_cpp.path(instructions())
    if not library.exists():
        return (
            f"no C++ was compiled for a processor with {instructions()}; "
            "`python -m runtime.ops.native.compile_cpp` compiles it, or says why not"
        )
    if not compile_cpp.is_current(library):
        return "the C++ was compiled from other sources; `python -m runtime.ops.native.compile_cpp` compiles it again"
    try:
        CDLL(str(library))
    except OSError as error:
        return f"the C++ cannot be loaded: {error}"
    return None


@cache
def instructions() -> str:
    """Return the variant for this processor. With AMX, oneDNN computes BF16 products, so AVX512_BF16 is not chosen."""
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        "AVX512_BF16"
        if capability == "AVX512" and "avx512_bf16" in _flags() and "amx_bf16" not in _flags()
        else capability
    )


@cache
def has_bf16() -> bool:
    """Whether this processor has instructions that multiply BF16; without them, oneDNN emulates them."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not _flags().isdisjoint(("avx512_bf16", "amx_bf16"))


def _flags() -> frozenset[str]:
    """Return the flags of this processor: all words of /proc/cpuinfo."""
    return frozenset(Path("/proc/cpuinfo").read_text("utf-8").split())


def identity() -> str:
    """Return the name of the implementation of ops: the instructions and the start of the digest, or "torch".

    Equal names give equal bits.
    """
    return "torch" if missing() else f"{instructions()} {compile_cpp.digest()[:12]}"


def functions(instructions: str) -> Functions:
    """Return the functions of the library for processors with these instructions."""
    library, functions_by_key = CDLL(str(compile_cpp.path(instructions))), {}
    for name, signature in signatures().items():
        for dtype, suffix in DTYPES.items():
            function = getattr(library, f"{name}_{suffix}", None)
            if function is None:  # not defined for this dtype, or not for these instructions
                continue
            function.argtypes, function.restype = [c for kind in signature for c in TYPES[kind]], None
            functions_by_key[name, dtype] = function, signature
    return functions_by_key


@cache
def _functions() -> Functions:
    return {} if missing() else functions(instructions())
