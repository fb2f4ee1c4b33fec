"""Kernels that test the tests' tools: accesses that the watch must refuse, and BF16 rounding.

For a process with TRITON_INTERPRET=1, like interpreted.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

import tests.compiler.emit.kernels.accesses
import tests.compiler.emit.kernels.rounding  # noqa: F401
from tests.compiler.emit.kernels.interpreted import random


@triton.jit
def _shift(source: Any, target: Any, BY: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Program p moves block p of `source` to block p·BY of `target`."""
    p = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(target + p * BY * BLOCK + i, tl.load(source + p * BLOCK + i))


def two_writers() -> None:
    with pytest.raises(AssertionError, match="two programs write one address"):
        _shift[(4,)](torch.zeros(64), torch.zeros(64), 0, 16)
    _shift[(4,)](torch.zeros(64), torch.zeros(64), 1, 16)  # the same kernel used well passes


def writer_and_reader() -> None:
    buffer = torch.zeros(128)
    with pytest.raises(AssertionError, match="a program reads what another writes"):
        _shift[(4,)](buffer, buffer, 2, 16)


def outside() -> None:
    with pytest.raises(InterpreterError, match="outside the tensors"):
        _shift[(4,)](torch.zeros(128)[:63], torch.zeros(64), 1, 16)


@triton.jit
def _masked(source: Any, target: Any, KNOWN: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """A block whose second half is not read, but stored."""
    i = tl.arange(0, BLOCK)
    if KNOWN:
        tl.store(target + i, tl.load(source + i, mask=i < BLOCK // 2, other=0))
    else:
        tl.store(target + i, tl.load(source + i, mask=i < BLOCK // 2))


def masked() -> None:
    """A masked-off load without `other` is not 0 in any dtype; with `other` it is that value."""
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int16, torch.uint8):
        source, target = torch.ones(16).to(dtype), torch.ones(16).to(dtype)
        _masked[(1,)](source, target, False, 16)
        first, second = target.double().chunk(2)
        assert (first == 1).all() and (second.isnan() if dtype.is_floating_point else second > 100).all()
    source, target = torch.ones(16), torch.ones(16)
    _masked[(1,)](source, target, True, 16)
    assert target.tolist() == [1.0] * 8 + [0.0] * 8


@triton.jit
def _count(total: Any, seen: Any, ADDEND: tl.constexpr) -> None:
    """Every program adds to one address, and reads another."""
    tl.atomic_add(total, ADDEND)
    tl.load(seen)


def atomics() -> None:
    total, source = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    _count[(4,)](total, source, 3)
    assert total[0] == 12
    with pytest.raises(AssertionError, match="reads or writes what another adds to"):
        _count[(4,)](total, total, 1)
    _count[(1,)](total, total, 1)  # of one program, in its own order
    with pytest.raises(InterpreterError, match="whose order shows"):
        _count[(4,)](torch.zeros(4), source, 1.0)


@triton.jit
def _swap(lock: Any) -> None:
    tl.atomic_cas(lock, 0, 1)


def swaps() -> None:
    with pytest.raises(InterpreterError, match="whose order shows"):
        _swap[(1,)](torch.zeros(4, dtype=torch.int32))


@triton.jit
def _draw(queue: Any, target: Any, REACH: tl.constexpr, LEAVE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Programs draw blocks of `target`, and write REACH blocks from there on. The second leaves the queue as LEAVE."""
    for _ in tl.range(0, 2):
        ticket = tl.atomic_add(queue, 1)
        tl.store(target + ticket * BLOCK + tl.arange(0, REACH * BLOCK), 1.0)
    if tl.program_id(0) == 1:
        tl.store(queue, LEAVE)


def queues() -> None:
    """Any program may draw a ticket, so two tickets of one program conflict as two programs do."""
    queue = torch.zeros(4, dtype=torch.int32)
    _draw[(2,)](queue, torch.zeros(64), 1, 0, 16)
    with pytest.raises(AssertionError, match="two programs write one address"):
        _draw[(2,)](queue.zero_(), torch.zeros(96), 2, 0, 16)
    with pytest.raises(InterpreterError, match="set to what is not 0"):
        _draw[(2,)](queue.zero_(), torch.zeros(64), 1, 1, 16)
    with pytest.raises(AssertionError, match="not left as it was"):
        _draw[(1,)](queue.zero_(), torch.zeros(64), 1, 0, 16)


@triton.jit
def _bytes(source: Any, target: Any) -> None:
    """Program 0 writes a word of 4 bytes, program 1 reads one of them."""
    if tl.program_id(0) == 0:
        tl.store(target.to(tl.pointer_type(tl.int32)), 1)
    else:
        tl.store(source, tl.load(target + 3))


def words() -> None:
    with pytest.raises(AssertionError, match="a program reads what another writes"):
        _bytes[(2,)](torch.zeros(4, dtype=torch.int8), torch.zeros(4, dtype=torch.int8))


@triton.jit
def _move(source: Any, target: Any, BY: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Move a block like `_shift`, through descriptors."""
    p = tl.program_id(0)
    target.store([p * BY * BLOCK, 0], source.load([p * BLOCK, 0]))


@triton.jit
def _made(source: Any, target: Any, rows: Any, BY: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Move a block like `_move`, through descriptors that the kernel makes itself."""
    first = tl.make_tensor_descriptor(source, [rows, 16], [16, 1], [BLOCK, 16])
    second = tl.make_tensor_descriptor(target, [rows, 16], [16, 1], [BLOCK, 16])
    _move(first, second, BY, BLOCK)


def descriptors() -> None:
    source, target = torch.arange(30 * 16.0).view(30, 16), torch.zeros(30, 16)
    first, second = (TensorDescriptor.from_tensor(tensor, [8, 16]) for tensor in (source, target))
    _move[(4,)](first, second, 1, 8)  # two rows of the last block are outside, and stay unchanged
    assert torch.equal(source, target)
    target.zero_()
    _made[(4,)](source, target, 30, 1, 8)
    assert torch.equal(source, target)
    with pytest.raises(AssertionError, match="two programs write one address"):
        _move[(4,)](first, second, 0, 8)
    with pytest.raises(AssertionError, match="two programs write one address"):
        _made[(4,)](source, target, 30, 0, 8)
    with pytest.raises(InterpreterError, match="outside the tensors"):
        _made[(4,)](source, target[:29], 30, 1, 8)


@triton.jit
def _compute(a: Any, b: Any, cast: Any, total: Any, product: Any, BLOCK: tl.constexpr) -> None:
    i = tl.arange(0, BLOCK)
    left, right = tl.load(a + i).to(tl.bfloat16), tl.load(b + i).to(tl.bfloat16)
    tl.store(cast + i, left)
    tl.store(total + i, left + right)
    tl.store(product + i, -left * right)


def _computed() -> tuple[torch.Tensor, ...]:
    special = torch.tensor([0.0, -0.0, torch.inf, 3.3e38, 1e-40, 1.00390625, 1.01171875, -1.00390625])  # with two ties
    a, b = torch.cat([special, random(1016, seed=1) * 1e3]), torch.cat([special.flip(0), random(1016, seed=2)])
    results = [torch.empty(1024, dtype=torch.bfloat16) for _ in range(3)]
    _compute[(1,)](a, b, *results, 1024)
    return (a.bfloat16(), b.bfloat16(), *results)


def bf16_casts() -> None:
    left, _, cast, _, _ = _computed()
    assert torch.equal(left.view(torch.int16), cast.view(torch.int16))


def bf16_arithmetic() -> None:
    left, right, _, total, product = _computed()
    torch.testing.assert_close(total, left + right, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(product, -left * right, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _multiply(a: Any, b: Any, c: Any, BLOCK: tl.constexpr) -> None:
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(c + offsets, tl.dot(tl.load(a + offsets), tl.load(b + offsets), input_precision="ieee"))


def bf16_products() -> None:
    a, b = (random(32, 32, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    c = torch.empty(32, 32)
    _multiply[(1,)](a, b, c, 32)
    bound = 32 * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert ((c.double() - a.double() @ b.double()).abs() <= bound).all()
