"""A simulated NCCL: torch.distributed for tensors of the pretend device, carried by gloo between their hosts.

As with NCCL, a started work is put on the current stream, and waiting for it makes the current stream wait,
not the host. Gloo makes the host wait, so only orders of calls that gloo can execute are possible here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from runtime.comm import collective, connect
from tests.gpu.pretend import SEEN, Pretend


@dataclass(frozen=True)
class Waited:
    """A gloo work that reports when it is awaited."""

    work: Any
    what: str

    def wait(self) -> None:
        SEEN.say("stream waits", self.what)
        self.work.wait()


class Group:
    """An NCCL group, by name, on top of a gloo group."""

    def __init__(self, gloo: Any, name: str) -> None:
        self.gloo, self.name = gloo, name

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Waited:
        (tensor,) = tensors
        call = self._said("send", tensor)
        return Waited(self.gloo.send([_inner(tensor)], peer, tag), call)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Waited:
        (tensor,) = tensors
        call = self._said("receive", tensor)
        return Waited(self.gloo.recv([_inner(tensor)], peer, tag), call)

    def alltoall_base(self, room: Tensor, sent: Tensor, taken: list[int], given: list[int]) -> Waited:
        call = self._said("all-to-all", sent, rows=not self.name.startswith("counts"))
        return Waited(self.gloo.alltoall_base(_inner(room), _inner(sent), taken, given), call)

    def allreduce(self, tensors: Sequence[Tensor], by: dist.ReduceOp) -> Waited:
        (tensor,) = tensors
        call = self._said("all-reduce" if by == dist.ReduceOp.SUM else "all-reduce of the largest", tensor)
        return Waited(self.gloo.allreduce([_inner(tensor)], by), call)

    def allgather(self, rows: Sequence[Sequence[Tensor]], mine: Sequence[Tensor]) -> Waited:
        call = self._said("all-gather", mine[0])
        return Waited(self.gloo.allgather([[_inner(row) for row in rows[0]]], [_inner(mine[0])]), call)

    def _said(self, call: str, tensor: Tensor, rows: bool = False) -> str:
        """Report a call. `rows`: their number depends on the data, and is left out."""
        extents = ["rows" if rows and not dim else str(extent) for dim, extent in enumerate(tensor.shape)]
        named_call = f"{call} {self.name}"
        SEEN.say("group call", f"{named_call}: {str(tensor.dtype).removeprefix('torch.')} [{', '.join(extents)}]")
        return named_call


class Options(SimpleNamespace):
    """Options of a group; `config` as for NCCL."""

    def __init__(self) -> None:
        super().__init__(config=SimpleNamespace())


class ProcessGroupNCCL(Group):
    Options = Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace) -> None:
        super().__init__(dist.ProcessGroupGloo(store, rank, size, options._timeout), options.group_name)


class PretendNccl:
    """Replaces `torch.distributed` in the runtime's channels. Everything else is torch's own."""

    ProcessGroupNCCL = ProcessGroupNCCL

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_backend(self) -> str:
        return "nccl"

    @property
    def group(self) -> SimpleNamespace:
        return SimpleNamespace(WORLD=Group(dist.group.WORLD, "world"))


def _inner(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, Pretend), "NCCL takes tensors of a device"
    return tensor.inner


@contextlib.contextmanager
def nccl() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (collective, connect):
            stack.enter_context(mock.patch.object(module, "dist", PretendNccl()))
        yield
