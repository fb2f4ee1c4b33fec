"""What collectives a rank runs, held to the program that says which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from runtime.comm.transport import Shares
from runtime.contract import Program
from runtime.trainer import Trainer

OF_THE_WORLD = ("all_reduce", "all_gather", "barrier", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor")
SUMS = {"targets": 2, "norm": 1}  # elements; all others are records


class Recorded:
    """The sums of a rank, which go on to its transport, and what was asked of them."""

    def __init__(self, trainer: Trainer) -> None:
        self.sums, self.asked = trainer.links.sums, list[tuple[str, str | int]]()
        trainer.links.sums = self

    def all_reduce(self, tensor: Tensor) -> None:
        self.asked.append(("sum", tensor.numel()))
        self.sums.all_reduce(tensor)

    def reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> None:
        self.asked.append(("reduce", bucket))
        self.sums.reduce(bucket, holders, flat, shares)

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        self.asked.append(("gather", bucket))
        self.sums.gather(bucket, holders, flat, shares)


def expected(trainer: Trainer, program: Program) -> list[tuple[str, str | int]]:
    """What a rank is to run of a program: the world's sums, and the buckets that it holds."""
    num_records = sum(
        next((y.experts for y in trainer.layers if n == f"load {y.name}"), 1) for n in trainer.plan.records
    )
    names = {"reduce": "gradients", "gather": "parameters"}
    return [
        (kind, SUMS.get(name, num_records)) if kind == "sum" else (kind, f"{names[kind]} {name}")
        for kind, name in (*program.prologue, *program.epilogue, *program.update)
        if kind == "sum" or name in trainer.buckets
    ]


@contextmanager
def nothing_else(trainer: Trainer, program: str, times: int = 1) -> Iterator[None]:
    """Hold what runs in the block to a program that is carried out `times`: its collectives in its order, no others."""
    recorded = trainer.links.sums
    assert isinstance(recorded, Recorded)
    recorded.asked.clear()
    with ExitStack() as stack:
        for name in OF_THE_WORLD:  # what torch has for all ranks; channels have communicators of their own
            stack.enter_context(mock.patch.object(dist, name, _refused))
        yield
    assert recorded.asked == times * expected(trainer, trainer.programs[program]), recorded.asked


def _refused(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a collective that no program lists")
