"""Simulated CUDA graphs for tensors of the pretend device.

As on a GPU, capturing executes nothing: results have no numbers (they are NaN), and nothing changes. A replay executes
the captured calls again on the same addresses. Graphs of a pool share memory: a tensor of the pool that no value owns
any more is given to the next result of its size. So a program that is replayed in another order than it was captured
in, or that reads a value too late, has wrong numbers here too.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from runtime.step import graphs
from tests.gpu.pretend import MAKES_NO_LAUNCH, SEEN, Kind, Pretend

IN_GRAPHS = {"launch"}  # what a device can do in a graph, without the host


class Pool:
    """The memory of graphs. `free`: addresses by size in bytes, the last freed first."""

    def __init__(self) -> None:
        self.free: dict[int, list[int]] = defaultdict(list)
        self.buffers: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """Return bytes that belong to the result until no tensor has them."""
        if not self.free[size]:
            self.buffers.append(torch.empty(size, dtype=torch.uint8))
            self.free[size].append(self.buffers[-1].data_ptr())
        address = self.free[size].pop()
        flat, memory = bytes_of(address, size)
        weakref.finalize(memory, self.free[size].append, address)
        return flat

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


POOLS: list[Pool] = []


def bytes_of(address: int, size: int) -> tuple[Tensor, Any]:
    """Return bytes at an address as a tensor, and the object that lives as long as its storage."""
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8), memory


def bytes_at(address: int, size: int, _: torch.device) -> Tensor:
    """Replaces `bytes_at` of runtime/step/graphs.py."""
    return Pretend(bytes_of(address, size)[0])


def flat_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def borrowed(tensor: Pretend) -> Pretend:
    """A view of a tensor that does not own its memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    return Pretend(view_like(tensor, bytes_of(storage.data_ptr(), storage.nbytes())[0]))


def view_like(tensor: Pretend, flat: Tensor) -> Tensor:
    inner = tensor.inner
    return flat.view(inner.dtype).as_strided(inner.size(), inner.stride(), inner.storage_offset())


class Call(NamedTuple):
    """A captured call; its tensors own no memory."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


class CUDAGraph:
    """Replaces torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.said: list[tuple[Kind, str]] = []

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        assert SEEN.graph is None and SEEN.stream != "compute" and capture_error_mode == "thread_local"
        self.pool, self.saved, self.made = pool, dict[int, tuple[Tensor, Tensor]](), dict[int, int]()
        SEEN.graph = self

    def capture_end(self) -> None:
        SEEN.graph = None
        for flat, before in self.saved.values():
            flat.copy_(before)
        for address, size in self.made.items():
            bytes_of(address, size)[0].fill_(255)
        self.saved.clear()

    def replay(self) -> None:
        for kind, what in self.said:
            SEEN.say(kind, what)
        with quiet():
            for call in self.calls:
                result = call.function(*call.args, **call.kwargs)
                for old, new in zip(tensors_of(call.result), tensors_of(result), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.inner.copy_(new.inner)

    # ---- while it is captured

    def say(self, kind: Kind, what: str) -> None:
        assert kind in IN_GRAPHS, f"{kind} {what} while a graph is captured"
        self.said.append((kind, what))

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = {address_of(tensor): tensor for tensor in tensors_of((args, kwargs))}
        for address, tensor in given.items():
            if address not in self.made and address not in self.saved:
                flat = flat_of(tensor)
                self.saved[address] = flat, flat.clone()
        moved: dict[int, Tensor] = {}  # storages of results in the pool, by their first address

        def to_pool(tensor: Pretend) -> Pretend:
            address, size = address_of(tensor), tensor.untyped_storage().nbytes()
            if address in given or not size:
                return tensor
            if address not in moved:
                moved[address] = self.pool.take(size).copy_(flat_of(tensor))
                self.made[address_of(moved[address])] = size
            return Pretend(view_like(tensor, moved[address]))

        with quiet():
            result = tree_map_only(Pretend, to_pool, call(*args, **kwargs))
        if getattr(call, "overloadpacket", None) in MAKES_NO_LAUNCH:
            for tensor in tensors_of(result):
                tensor.inner.zero_()  # indices must be valid where what is captured reads them here
            return result
        self.calls.append(Call(call, *(tree_map_only(Pretend, borrowed, part) for part in (args, kwargs, result))))
        return result


def tensors_of(values: Any) -> list[Pretend]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Pretend)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, nothing is reported or captured."""
    SEEN.kernels += 1
    try:
        yield
    finally:
        SEEN.kernels -= 1


def pool_handle() -> Pool:
    """Replaces torch.cuda.graph_pool_handle."""
    POOLS.append(Pool())
    return POOLS[-1]


@contextlib.contextmanager
def pretended_graphs() -> Iterator[None]:
    """Graphs on the pretend device, inside `pretended`."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (torch.cuda, "CUDAGraph", CUDAGraph),
            (torch.cuda, "graph_pool_handle", pool_handle),
            (torch.cuda, "empty_cache", lambda: None),
            (graphs, "bytes_at", bytes_at),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield
