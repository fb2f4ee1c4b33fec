"""Runs every C++ op on memory next to protected pages: `python -m tests.runtime.ops.native.guarded AVX2`.

Each operand and result touches a protected page, so that an access one element too far ends this process. Bytes
between the rows of a view, and beside a result on its page, must not change. Prints each case before it runs, and at
the end a digest of all results.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.ops import OPS
from runtime.ops.native import library, ops
from tests.runtime.ops import cases
from tests.runtime.ops.cases import Source, as_tuple, gradient_arguments

LIBC = ctypes.CDLL(None, use_errno=True)
UNTOUCHED = 0xA5
PROT_NONE = 0
E4M3, WIDE = torch.float8_e4m3fn, (torch.float32, torch.bfloat16)
VIEWED = (*WIDE, E4M3, torch.float64)
WIDTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 50)


@dataclass(frozen=True)
class Fenced:
    """A copy of a tensor, with its strides, between two protected pages."""

    copy: Tensor
    others: Tensor  # mask over `all`: bytes that do not belong to the copy
    all: Tensor  # bytes between the pages

    @staticmethod
    def of(x: Tensor, at_end: bool) -> Fenced:
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        extent = last + 1 if x.numel() else 0
        pages = max(1, -(-extent * x.itemsize // mmap.PAGESIZE))
        inside = _between(pages)
        first = len(inside) - extent * x.itemsize if at_end else 0
        mine = torch.zeros(extent, dtype=torch.bool)
        mine.as_strided(x.shape, x.stride()).fill_(True)
        outside = torch.ones(len(inside), dtype=torch.bool)
        outside[first : first + extent * x.itemsize] = ~mine.repeat_interleave(x.itemsize)
        flat = inside[first : first + extent * x.itemsize].view(x.dtype)
        return Fenced(flat.as_strided(x.shape, x.stride()).copy_(x), outside, inside)


def _between(pages: int) -> Tensor:
    """The bytes of some pages, with a protected page on either side."""
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        address = ctypes.c_void_p(start + page * mmap.PAGESIZE)
        if LIBC.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    inside = torch.frombuffer(memory, dtype=torch.uint8, offset=mmap.PAGESIZE, count=pages * mmap.PAGESIZE)
    return inside.fill_(UNTOUCHED)


def fenced_call(at_end: bool, name: str, dtype: torch.dtype, *args: Any) -> None:
    """Call the library on fenced copies, and assert that nothing beside them was written."""
    copies = [Fenced.of(arg, at_end) if isinstance(arg, Tensor) else arg for arg in args]
    library.call(name, dtype, *(fenced.copy if isinstance(fenced, Fenced) else fenced for fenced in copies))
    for arg, fenced in zip(args, copies, strict=True):
        if isinstance(fenced, Fenced):
            assert (fenced.all[fenced.others] == UNTOUCHED).all(), f"{name} wrote beside its results"
            arg.copy_(fenced.copy)  # a result, or an unchanged operand: see `check`


def check(op: str, dtype: torch.dtype, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Assert that the op and its gradients give the same on fenced memory and change no operand. Yields results."""
    for name, chosen in ((op, args), *gradient_arguments(op, args, Source(dtype, 1))):
        yield from _check(name, chosen)


def _check(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    print(name, [(arg.dtype, *arg.shape) if isinstance(arg, Tensor) else arg for arg in args], flush=True)
    before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    wanted = _results(name, args)
    for at_end in (True, False):
        ops.call = ops.call = ops.call = partial(fenced_call, at_end)
        for result, expected in zip(_results(name, _columns(args)), wanted, strict=True):
            assert _equal(result, expected), name
    ops.call = ops.call = ops.call = library.call
    for arg, was in zip(args, before, strict=True):
        assert _equal(arg, was) if isinstance(arg, Tensor) else arg == was, name
    return wanted


def _results(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The results of an op, or the sum of an E4M3 op with zeros of the shape of its first argument."""
    if not name.endswith("fp8_wgrad_"):
        return as_tuple(OPS[name](*args))
    acc = torch.zeros_like(args[0])
    OPS[name](acc, *args[1:])
    return (acc,)


def _equal(one: Tensor, two: Tensor) -> bool:
    return torch.equal(one.float(), two.float()) if one.itemsize == 1 else torch.equal(one, two)


def _columns(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with matrices replaced by views of columns."""

    def view(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (3, 2))[:, 3 : 3 + x.shape[1]]

    return tuple(view(x) if isinstance(x, Tensor) and x.dim() == 2 and x.dtype in VIEWED else x for x in args)


def all_cases(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    source = Source(dtype, 0)
    for width in WIDTHS:
        yield "rmsnorm", cases.rmsnorm(source, 3, width)
        yield "swiglu", cases.swiglu(source, 3, width)
        h_RM, gate_R = cases.gated_swiglu(source, 3, width)
        yield "gated_swiglu", (h_RM, gate_R.float())
        yield "cross_entropy", cases.cross_entropy(source, 5, width)
        yield "mla_attention", cases.mla_attention(source, 2, width, 2, 5, 2, 3)
        yield "mla_attention", cases.mla_attention(source, 2, width, 2, 5, 2, 3, documents=True)
        yield "mla_attention", cases.mla_attention(source, 1, 5, 2, width, 6, width)
        yield "gqa_attention", cases.gqa_attention(source, 2, width, 2, 2, 6)
        yield "gqa_attention", cases.gqa_attention(source, 2, width, 2, 2, 6, documents=True)
        yield "gqa_attention_peaks", cases.gqa_attention(source, 2, width, 2, 2, 6)
        yield "mla_attention_peaks", cases.mla_attention(source, 2, width, 2, 5, 2, 3)
        yield "gqa_attention", cases.gqa_attention(source, 1, 5, 1, 2, 2 * width)
        yield "linear", cases.linear(source, width, 5, 3)
        yield "linear", cases.linear(source, 3, width, 5)
        yield "linear", cases.linear(source, 5, 3, width)
        yield "grouped_linear", cases.grouped_linear(source, width, 2 * width, 7)
    yield "linear", cases.linear(source, 101, 515, 70)


def cases_of_e4m3() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for dtype in WIDE:
        source = Source(dtype, 0)
        for width in (*WIDTHS, 64, 130, 200):
            for shape in ((3, width), (width, 3)):
                for op in ("quantise", "quantise_columns", "quantise_blocks"):
                    yield op, (source.normal(*shape), width % 2 == 0)
    for width in (*WIDTHS, 130):
        for shape in ((3, width), (width, 3)):
            yield "requantise", (*_scaled(*shape), False)
        for M, N, K in ((3, width, 5), (width, 5, 3), (5, 3, width)):
            yield "linear_fp8", (*_scaled(M, K), *_scaled(N, K, 128))
            yield "linear_fp8_wgrad_", (torch.zeros(M, N), *_scaled(M, K), *_scaled(N, K))
    ends, tiles = torch.tensor([1, 260], dtype=torch.int32), torch.tensor([128, 384], dtype=torch.int32)
    experts, scales = _scaled(2 * 70, 30, 70)
    by_expert = experts.view(2, 70, 30), scales.view(2, 1, 1)
    yield "grouped_linear_fp8", (*_scaled(260, 30), *by_expert, ends)
    yield "grouped_linear_fp8_wgrad_", (torch.zeros(2, 70, 30), *_scaled(70, 384), *_scaled(30, 384), tiles)


def cases_of_formats() -> Iterator[tuple[str, tuple[Any, ...]]]:
    key = torch.tensor([1, 2, 3])
    for width in (1, 9, 16, 33, 130):
        source = Source(torch.float32, width)
        for shape in ((3, width), (width, 3)):
            x = source.normal(*shape)
            yield "quantise_e5m6", (x,)
            for name in ("fp8_blocks", "mxfp8", "nvfp4"):
                yield f"quantise_both_{name}", (x, name == "nvfp4", key)
                yield f"quantise_blocks_{name}", (source.normal(2, *shape),)
                planes = OPS[f"quantise_{name}"](x)
                yield f"linear_{name}", (*planes, *OPS[f"quantise_blocks_{name}"](x)[: len(planes)])


def _scaled(rows: int, columns: int, tile: int = 1) -> tuple[Tensor, Tensor]:
    """(data, scales of `tile` × 128 tiles)."""
    source = Source(torch.float32, rows)
    return source.normal(rows, columns).to(E4M3), source.normal(-(-rows // tile), -(-columns // 128))


def main(instructions: str) -> int:
    functions = library.functions(instructions)
    library._functions = lambda: functions
    digest = hashlib.sha256()
    for dtype in WIDE:
        for op, args in all_cases(dtype):
            for result in check(op, dtype, args):
                digest.update(_bytes(result))
    for op, args in (*cases_of_e4m3(), *cases_of_formats()):
        for result in _check(op, args):
            digest.update(_bytes(result))
    print("done", digest.hexdigest())
    return 0


def _bytes(x: Tensor) -> bytes:
    return x.reshape(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
