"""Finds and calls the C++ library for this machine: the operands it takes, and its functions by name and dtype."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from ctypes import CDLL, c_float, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.ops.native import compile_cpp


class NativeFunction(NamedTuple):
    """A C++ function. `bind` turns a function of addresses, strides and numbers into one of tensors and numbers."""

    function: Callable[..., None]
    bind: Callable[[Callable[..., None]], Callable[..., None]]
    call: Callable[..., None]  # bind(function)


Functions = Mapping[tuple[str, torch.dtype], NativeFunction]

OFF = "DSC_OPS"  # =torch: ops run on torch
FEW = 8  # as in few_rows.h
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


def multiplies_few_rows(a: Tensor, b: Tensor) -> bool:
    """Whether the product of a few rows with a transposed matrix runs in C++, where other products may not."""
    compiled = ("few_rows", a.dtype) in _functions() and a.dtype == b.dtype
    return compiled and len(a) <= FEW and a.is_cpu and a.stride(1) == 1 and b.stride(0) == 1


def call(name: str, dtype: torch.dtype, *args: Tensor | float | None) -> None:
    """Call a C++ function for operands of `dtype`; for an optimizer update, the dtype of the moments. Tensors that must
    be contiguous are copied if they are not."""
    _functions()[name, dtype].call(*args)


def prepare(name: str, dtype: torch.dtype, *args: Tensor | float | None) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the C++ function, and the addresses and numbers that `call` gives it for these arguments. The tensors must
    live as long as these are used, and must not need a copy. KeyError if there is no such function."""
    native, values = _functions()[name, dtype], list[Any]()
    native.bind(lambda *numbers: values.extend(numbers))(*args)
    assert {arg.data_ptr() for arg in args if isinstance(arg, Tensor)} <= set(values), f"{name}: an operand is copied"
    return native.function, tuple(values)


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
            bind = _binder(signature)
            functions_by_key[name, dtype] = NativeFunction(function, bind, bind(function))
    return functions_by_key


@cache
def _binder(signature: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return `NativeFunction.bind` for a signature.

    An op takes few microseconds. So the conversion of arguments is written out for a signature, as Python, and is not
    found out in every call: `rmsnorm` of one row takes 1.5 µs, and did 2.4.
    """
    names = [f"{kind}{index}" for index, kind in enumerate(signature)]
    values, lines = [], []
    for name, kind in zip(names, signature, strict=True):
        if kind == TENSOR:  # rebound, so that a copy lives until the function has returned
            lines.append(f"        if {name} is not None: {name} = {name}.contiguous()")
            values.append(f"None if {name} is None else {name}.data_ptr()")
        elif kind == ROWS:
            values.append(f"{name}.data_ptr(), {name}.stride(0)")
        elif kind == MATRIX:
            values.append(f"{name}.data_ptr(), *{name}.stride()")
        else:
            values.append(name)
    body = [f"    def call({', '.join(names)}):", *lines, f"        function({', '.join(values)})"]
    namespace: dict[str, Any] = {}
    exec("\n".join(["def bind(function):", *body, "    return call"]), namespace)
    return namespace["bind"]


@cache
def _functions() -> Functions:
    return {} if missing() else functions(instructions())
