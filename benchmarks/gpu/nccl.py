"""The operations of NCCL that a rank uses, on a group of one rank. A worker.

They are called through `Communicator`, with the thread blocks of a plan, on buffers as a step has them: rows in bytes
with sizes for each member, a reduce-scatter into a part of its input, sums to owners in one launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from runtime.comm.collective import Communicator, Meeting
from runtime.comm.transport import Channel
from runtime.observe.device import set_up_cuda
from runtime.system.workers import serve

ROWS, WIDTH, CTAS = 4096, 7168, 16
TIMEOUT_S = 30.0


def tasks() -> list[dict[str, Any]]:
    return [{"name": name, "ctas": ctas} for name in OPERATIONS for ctas in (0, CTAS)]


def handle(task: Mapping[str, Any], device: str = "cuda") -> dict[str, Any]:
    """Seconds of an operation, the mean of ten; it fails if the numbers are wrong."""
    communicator = _communicator(task["ctas"], device)
    call = OPERATIONS[task["name"]](communicator, device)
    if not call():
        return {"failed": "it gives other numbers"}
    if device != "cuda":
        return {}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        call.again()
    end.record()
    torch.cuda.synchronize()
    return {"seconds": start.elapsed_time(end) / 1e4}


@cache
def _communicator(ctas: int, device: str) -> Communicator:
    if not dist.is_initialized():
        if device == "cuda":
            set_up_cuda()
            torch.cuda.set_device(0)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    meeting = Meeting(dist.HashStore(), 0, TIMEOUT_S)
    return Communicator(Channel("expert", (0,)), 0, meeting, TIMEOUT_S, TIMEOUT_S, ctas)


class Checked:
    """An operation to run again, and whether its result is right."""

    def __init__(self, again: Callable[[], Any], is_right: Callable[[], bool]) -> None:
        self.again, self._is_right = again, is_right

    def __call__(self) -> bool:
        self.again()
        return self._is_right()


def _exchange(communicator: Communicator, device: str) -> Checked:
    rows = torch.randint(0, 255, (ROWS, WIDTH), dtype=torch.uint8, device=device)
    room = torch.zeros_like(rows)
    return Checked(
        lambda: communicator.all_to_all(room, rows, [ROWS], [ROWS]).wait(), lambda: bool(torch.equal(room, rows))
    )


def _sum(communicator: Communicator, device: str) -> Checked:
    values = torch.randn(ROWS, WIDTH, device=device)
    expected = values.clone()
    return Checked(lambda: communicator.all_reduce(values).wait(), lambda: bool(torch.equal(values, expected)))


def _scatter(communicator: Communicator, device: str) -> Checked:
    values = torch.randn(ROWS * WIDTH, device=device)
    expected = values.clone()
    return Checked(
        lambda: communicator.reduce_scatter(values, values).wait(), lambda: bool(torch.equal(values, expected))
    )


def _owners(communicator: Communicator, device: str) -> Checked:
    values = torch.randn(ROWS * WIDTH, device=device)
    parts = [(part, 0) for part in values.split([ROWS, ROWS * WIDTH - ROWS])]
    expected = values.clone()
    return Checked(lambda: communicator.reduce_to_owners(parts).wait(), lambda: bool(torch.equal(values, expected)))


def _gather(communicator: Communicator, device: str) -> Checked:
    part = torch.randn(ROWS, WIDTH, device=device).bfloat16()
    whole = torch.zeros_like(part)
    return Checked(lambda: communicator.start_all_gather([whole], part).wait(), lambda: bool(torch.equal(whole, part)))


OPERATIONS: dict[str, Callable[[Communicator, str], Checked]] = {
    "all-to-all of bytes": _exchange,
    "all-reduce": _sum,
    "reduce-scatter in place": _scatter,
    "sums to owners": _owners,
    "all-gather": _gather,
}


if __name__ == "__main__":
    sys.exit(serve(handle))
