"""Watches what the programs of a launch touch in Triton's interpreter. To be imported before any launch.

The interpreter runs programs one after another, which hides every race. So each launch is checked for what a race
needs: an address that one program writes and another reads or writes. Several programs may add integers to one address
atomically, in whatever order, if no other access there is anything else; no other atomic is taken. Addresses outside
the launch's tensors are refused as well, where the interpreter would read or overwrite what lies there.

Programs may draw tickets from the launch's argument `queue`: by adding 1, one after another. Any program may draw any
ticket, so what follows a draw is checked as if a program of its own did it. The queue must be 0 after the launch, and
by no other store than of 0.

Where a mask is off, a load gives anything unless it says what: here NaN, or a large number, where the interpreter has
0. Tensor descriptors read and write through the same two functions as pointers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle, _get_np_dtype
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_PROGRAMS = 64  # a slower test than needed, otherwise

_call, _set_grid_idx = GridExecutor.__call__, InterpreterBuilder.set_grid_idx
_load, _store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
_rmw = InterpreterBuilder.create_atomic_rmw
_ADD = tl.core.ir.ATOMIC_OP.ADD

Kind = list[list[tuple[np.ndarray, int]]]  # by program: the addresses of accesses, and bytes of each


class Accesses:
    """Addresses that each program of one launch read, wrote, and added to atomically."""

    def __init__(self, tensors: list[torch.Tensor], queue: torch.Tensor | None) -> None:
        self.queue = queue
        self.programs = 0
        self.ranges = [(tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor)) for tensor in tensors]
        self.read: Kind = []
        self.written: Kind = []
        self.added: Kind = []

    def begin_program(self) -> None:
        self.programs += 1
        self.begin()

    def begin(self) -> None:
        for kind in (self.read, self.written, self.added):
            kind.append([])

    def note(self, kind: Kind, pointers: Any, mask: Any) -> None:
        inside_mask = np.asarray(getattr(mask, "data", mask), dtype=bool)
        addresses = np.asarray(pointers.data)[np.broadcast_to(inside_mask, np.shape(pointers.data))].ravel()
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(addresses.shape, bool)
        for start, end in self.ranges:
            inside |= (addresses >= start) & (addresses + size <= end)
        assert inside.all(), "an access outside the tensors of the launch"
        kind[-1].append((addresses, size))

    def of_queue(self, pointers: Any) -> bool:
        return (
            self.queue is not None
            and np.size(pointers.data) == 1
            and int(pointers.data.item()) == self.queue.data_ptr()
        )

    def check(self) -> None:
        assert self.programs <= MAX_PROGRAMS, f"{self.programs} programs"
        assert self.queue is None or not self.queue.any(), "the queue is not left as it was"
        all_accesses = (*self.read, *self.written, *self.added)
        unit = min((size for program in all_accesses for _, size in program), default=1)
        written, added = ([_union(program, unit) for program in kind] for kind in (self.written, self.added))
        touched = [
            np.union1d(_union(program, unit), writes) for program, writes in zip(self.read, written, strict=True)
        ]
        writers, by_writer = _labelled(written)
        # Of the programs that touch a written address, all must be its only writer.
        assert all(first != second for first, second in pairwise(writers)), "two programs write one address"
        assert _alone(writers, by_writer, *_labelled(touched)), "a program reads what another writes"
        adders, by_adder = _labelled(added)
        first = np.concatenate([np.ones(min(1, len(adders)), bool), adders[1:] != adders[:-1]])
        shared = np.unique(adders[~first])
        touches = _labelled(touched)
        ordered = _alone(adders[first], by_adder[first], *touches) and not np.isin(shared, touches[0]).any()
        assert ordered, "a program reads or writes what another adds to"


def _extent_bytes(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _union(parts: list[tuple[np.ndarray, int]], unit: int) -> np.ndarray:
    """All addresses of accesses, each access cut into pieces of `unit` bytes; ascending."""
    pieces = [(addresses[:, None] + np.arange(0, size, unit, dtype=np.uint64)).ravel() for addresses, size in parts]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *pieces]))


def _labelled(programs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(all addresses, ascending; the program of each)."""
    addresses = np.concatenate([np.empty(0, np.uint64), *programs])
    labels = np.repeat(np.arange(len(programs)), [len(program) for program in programs])
    order = np.argsort(addresses, kind="stable")
    return addresses[order], labels[order]


def _alone(owned: np.ndarray, owner: np.ndarray, others: np.ndarray, by_other: np.ndarray) -> bool:
    """Whether every access to an address that has an owner is its owner's. `owned`: ascending, without repetition."""
    positions = np.searchsorted(owned, others)
    has_owner = positions < len(owned)
    has_owner[has_owner] = owned[positions[has_owner]] == others[has_owner]
    return bool((owner[positions[has_owner]] == by_other[has_owner]).all())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, TensorDescriptor):
        yield value.base
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)


def launch(self: Any, *args: Any, **options: Any) -> Any:
    queue = inspect.getcallargs(self.fn, *args, **_of_the_kernel(self, options)).get("queue")
    InterpreterBuilder.accesses = accesses = Accesses(list(_tensors((*args, *options.values()))), queue)
    result = _call(self, *args, **options)
    accesses.check()
    return result


def _of_the_kernel(self: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in self.arg_names}


def set_grid_idx(self: Any, *index: int) -> None:
    self.accesses.begin_program()
    _set_grid_idx(self, *index)


def create_masked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
    self.accesses.note(self.accesses.read, pointers, mask)
    if other is None and np.size(pointers.data) > 1:  # of one element, the interpreter drops an `other` that is 0
        other = _anything(pointers)
    return _load(self, pointers, mask, other, *rest, **named)


def _anything(pointers: Any) -> TensorHandle:
    kind = pointers.get_element_ty()
    stored = _get_np_dtype(kind)  # BF16 and E4M3 are kept as integers
    byte = 0xFF if kind.is_floating() else 0x01 if kind.is_int1() else 0x7F
    shape = np.shape(pointers.data)
    return TensorHandle(np.full((*shape, stored.itemsize), byte, np.uint8).view(stored).reshape(shape), kind)


def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
    if self.accesses.of_queue(pointers):
        assert not np.any(value.data), "the queue is set to what is not 0"
    else:
        self.accesses.note(self.accesses.written, pointers, mask)
    return _store(self, pointers, value, mask, *rest, **named)


def create_atomic_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    assert operation == _ADD and value.dtype.scalar.is_int(), "an atomic whose order shows: no addition of integers"
    if self.accesses.of_queue(pointers):
        assert np.all(value.data == 1), "a draw of more than one ticket"
        self.accesses.begin()
    else:
        self.accesses.note(self.accesses.added, pointers, mask)
    return _rmw(self, operation, pointers, value, mask, *rest)


def create_atomic_cas(*_: Any) -> Any:
    raise AssertionError("an atomic whose order shows: compare and swap")


GridExecutor.__call__ = launch
InterpreterBuilder.set_grid_idx = set_grid_idx
InterpreterBuilder.create_masked_load = create_masked_load
InterpreterBuilder.create_masked_store = create_masked_store
InterpreterBuilder.create_atomic_rmw = create_atomic_rmw
InterpreterBuilder.create_atomic_cas = create_atomic_cas
