"""Watches what the programs of a launch touch in Triton's interpreter. To be imported before any launch.

The interpreter runs programs one after another, which hides every race. So each launch is checked for what a race
needs: an address that one program writes and another reads or writes. Addresses outside the launch's tensors are
refused as well, where the interpreter would read or overwrite what lies there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

MAX_PROGRAMS = 64  # a slower test than needed, otherwise

_call, _set_grid_idx = GridExecutor.__call__, InterpreterBuilder.set_grid_idx
_load, _store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store


class Accesses:
    """Of one launch: the addresses each program read and wrote."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.ranges = [(tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor)) for tensor in tensors]
        self.read: list[list[np.ndarray]] = []
        self.written: list[list[np.ndarray]] = []

    def begin_program(self) -> None:
        self.read.append([])
        self.written.append([])

    def note(self, kind: list[list[np.ndarray]], pointers: Any, mask: Any) -> None:
        addresses = np.asarray(pointers.data)[np.broadcast_to(mask.data, np.shape(pointers.data))].ravel()
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(addresses.shape, bool)
        for start, end in self.ranges:
            inside |= (addresses >= start) & (addresses + size <= end)
        assert inside.all(), "an access outside the tensors of the launch"
        kind[-1].append(addresses)

    def check(self) -> None:
        assert len(self.read) <= MAX_PROGRAMS, f"{len(self.read)} programs"
        written = [_union(program) for program in self.written]
        touched = [np.union1d(_union(program), own) for program, own in zip(self.read, written, strict=True)]
        writers, by_writer = _labelled(written)
        others, by_other = _labelled(touched)
        # Of the programs that touch a written address, all must be its only writer.
        assert all(first != second for first, second in pairwise(writers)), "two programs write one address"
        where = np.searchsorted(writers, others)
        found = where < len(writers)
        found[found] = writers[where[found]] == others[found]
        assert (by_writer[where[found]] == by_other[found]).all(), "a program reads what another writes"


def _extent_bytes(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _union(parts: list[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))


def _labelled(programs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(all addresses, ascending; the program of each)."""
    addresses = np.concatenate([np.empty(0, np.uint64), *programs])
    labels = np.repeat(np.arange(len(programs)), [len(program) for program in programs])
    order = np.argsort(addresses, kind="stable")
    return addresses[order], labels[order]


def launch(self: Any, *args: Any, **options: Any) -> Any:
    tensors = [arg for arg in (*args, *options.values()) if isinstance(arg, torch.Tensor)]
    InterpreterBuilder.accesses = accesses = Accesses(tensors)
    result = _call(self, *args, **options)
    accesses.check()
    return result


def set_grid_idx(self: Any, *index: int) -> None:
    self.accesses.begin_program()
    _set_grid_idx(self, *index)


def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
    self.accesses.note(self.accesses.read, pointers, mask)
    return _load(self, pointers, mask, *rest)


def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    self.accesses.note(self.accesses.written, pointers, mask)
    return _store(self, pointers, value, mask, *rest)


GridExecutor.__call__ = launch
InterpreterBuilder.set_grid_idx = set_grid_idx
InterpreterBuilder.create_masked_load = create_masked_load
InterpreterBuilder.create_masked_store = create_masked_store
