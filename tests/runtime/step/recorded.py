"""The collectives that a rank runs, compared with its program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NoReturn
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from runtime.comm.transport import Shares, Work
from runtime.contract import RunProgram
from runtime.step.step_time import NUMBERS
from runtime.step.trainer import Trainer

OF_THE_WORLD = ("all_reduce", "all_gather", "barrier", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor")


class Recorded:
    """Records the sums that a rank requests, and passes them on to its transport."""

    def __init__(self, trainer: Trainer) -> None:
        self.sums, self.asked = trainer.links.sums, list[tuple[str, str | int]]()
        trainer.links.sums = self

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        self.asked.append(("max" if largest else "sum", tensor.numel()))
        self.sums.all_reduce(tensor, largest)

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        self.asked.append(("start", bucket))
        return Asked(self.sums.start_reduce(bucket, holders, flat, shares), ("reduce", bucket), self.asked)

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        self.asked.append(("gather", bucket))
        self.sums.gather(bucket, holders, flat, shares)


@dataclass(frozen=True)
class Asked:
    """A reduction in progress, and whether it was waited for."""

    work: Work
    what: tuple[str, str]
    asked: list[tuple[str, str | int]]

    def wait(self) -> None:
        self.asked.append(self.what)
        self.work.wait()


def expected(trainer: Trainer, program: RunProgram) -> list[tuple[str, str | int]]:
    """The collectives of a program that a rank has to run: sums over the world, and the buckets that it holds."""
    num_records = sum(
        next((y.experts for y in trainer.layers if n == f"load {y.name}"), 1) for n in trainer.plan.records
    )
    heads = sum(layer.heads for layer in trainer.plan.clipped)
    # Elements; all other sums are of records.
    sums = {"targets": 2, "norm": 1 + NUMBERS * trainer.plan.mesh.world, "logits": heads}
    names = {"reduce": "gradients", "gather": "parameters"}
    before, after = (
        [
            (kind, sums.get(name, num_records)) if kind in ("sum", "max") else (kind, f"{names[kind]} {name}")
            for kind, name in listed
            if kind in ("sum", "max") or name in trainer.buckets
        ]
        for listed in (program.prologue, (*program.epilogue, *program.update))
    )
    started = [
        ("start", bucket.gradients_name)
        for _, stages in (program.reductions[trainer.pp_rank] if program.reductions else ())
        for bucket in trainer.state.buckets
        if bucket.stages == stages and bucket.is_reduced
    ]
    return [*before, *started, *after]


@contextmanager
def nothing_else(trainer: Trainer, program: str, times: int = 1) -> Iterator[None]:
    """Assert that the block runs the collectives of `times` executions of a program, in its order, and no others."""
    recorded = trainer.links.sums
    assert isinstance(recorded, Recorded)
    recorded.asked.clear()
    with ExitStack() as stack:
        for name in OF_THE_WORLD:  # torch's functions for all ranks; channels have separate communicators
            stack.enter_context(mock.patch.object(dist, name, _refused))
        yield
    assert recorded.asked == times * expected(trainer, trainer.programs[program]), recorded.asked


def _refused(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a collective that no program lists")
