"""Runs every op in C++ on memory that ends, or begins, where none may be read: `python -m tests.native.guarded AVX2`.

Each operand and result lies against a page that is protected, so that one element too far ends this process; and what
lies between the rows of a view, and beside a result on its page, must be as it was. Prints each case before it runs,
and at the end a digest of all results.
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

from runtime.native import library, ops
from runtime.ops import OPS
from tests.ops import cases
from tests.ops.cases import Source, as_tuple, gradient_arguments

LIBC = ctypes.CDLL(None, use_errno=True)
UNTOUCHED = 0xA5
PROT_NONE = 0
WIDTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 50)


@dataclass(frozen=True)
class Fenced:
    """A copy of a tensor, of its strides, between two protected pages."""

    copy: Tensor
    others: Tensor  # a mask of `all`: bytes that are not the copy's
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
        others = torch.ones(len(inside), dtype=torch.bool)
        others[first : first + extent * x.itemsize] = ~mine.repeat_interleave(x.itemsize)
        flat = inside[first : first + extent * x.itemsize].view(x.dtype)
        return Fenced(flat.as_strided(x.shape, x.stride()).copy_(x), others, inside)


def _between(pages: int) -> Tensor:
    """The bytes of some pages, with a protected one on either side."""
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        address = ctypes.c_void_p(start + page * mmap.PAGESIZE)
        if LIBC.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    inside = torch.frombuffer(memory, dtype=torch.uint8, offset=mmap.PAGESIZE, count=pages * mmap.PAGESIZE)
    return inside.fill_(UNTOUCHED)


def fenced_call(at_end: bool, name: str, dtype: torch.dtype, *args: Any) -> None:
    """Call the library on copies between fences, and assert that nothing beside them was written."""
    copies = [Fenced.of(arg, at_end) if isinstance(arg, Tensor) else arg for arg in args]
    library.call(name, dtype, *(each.copy if isinstance(each, Fenced) else each for each in copies))
    for arg, each in zip(args, copies, strict=True):
        if isinstance(each, Fenced):
            assert (each.all[each.others] == UNTOUCHED).all(), f"{name} wrote beside its results"
            arg.copy_(each.copy)  # a result, or what has not changed: `check` looks


def check(op: str, dtype: torch.dtype, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """The op and its gradients on fenced memory give what they give elsewhere, and change no operand. The results."""
    source = Source(dtype, 1)
    for name, chosen in ((op, args), *gradient_arguments(op, args, source)):
        print(name, dtype, [tuple(arg.shape) if isinstance(arg, Tensor) else arg for arg in chosen], flush=True)
        before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in chosen]
        ops.call = library.call
        wanted = as_tuple(OPS[name](*chosen))
        for at_end in (True, False):
            ops.call = partial(fenced_call, at_end)
            for one, two in zip(as_tuple(OPS[name](*_columns(chosen))), wanted, strict=True):
                assert torch.equal(one, two), name
        for arg, was in zip(chosen, before, strict=True):
            assert torch.equal(arg, was) if isinstance(arg, Tensor) else arg == was, name
        ops.call = library.call
        yield from wanted


def _columns(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Matrices as views of columns."""

    def view(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (3, 2))[:, 3 : 3 + x.shape[1]]

    return tuple(view(x) if isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point() else x for x in args)


def all_cases(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    source = Source(dtype, 0)
    for width in WIDTHS:
        yield "rmsnorm", cases.rmsnorm(source, 3, width)
        yield "swiglu", cases.swiglu(source, 3, width)
        h_RM, gate_R = cases.gated_swiglu(source, 3, width)
        yield "gated_swiglu", (h_RM, gate_R.float())
        yield "cross_entropy", cases.cross_entropy(source, 5, width)
        yield "mla_attention", cases.mla_attention(source, 2, width, 2, 5, 2, 3)
        yield "mla_attention", cases.mla_attention(source, 1, 5, 2, width, 6, width)
        yield "gqa_attention", cases.gqa_attention(source, 2, width, 2, 2, 6)
        yield "gqa_attention", cases.gqa_attention(source, 1, 5, 1, 2, 2 * width)
        yield "linear", cases.linear(source, width, 5, 3)
        yield "linear", cases.linear(source, 3, width, 5)
        yield "linear", cases.linear(source, 5, 3, width)
        yield "grouped_linear", cases.grouped_linear(source, width, 2 * width, 7)
    yield "linear", cases.linear(source, 101, 515, 70)


def main(instructions: str) -> int:
    functions = library.functions(instructions)
    library._functions = lambda: functions
    digest = hashlib.sha256()
    for dtype in library.DTYPES:
        for op, args in all_cases(dtype):
            for result in check(op, dtype, args):
                digest.update(result.view(torch.uint8).numpy().tobytes() if result.dim() else str(result).encode())
    print("done", digest.hexdigest())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
