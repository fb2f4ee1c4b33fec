"""The contestant's side of the arena: prepare, warm up, then run steps on order.

Orders and replies are lines of JSON in two pipes, whose descriptors are passed as `--wire READ,WRITE`. With several
ranks, rank 0 has the pipes and passes orders on through the process group, where the others wait.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

WARM_UP = 4  # steps; the loss of the first is compared between contestants

Step = Callable[[], float | None]  # runs one training step and returns its loss


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def serve(wire: str, step: Step, info: Mapping[str, Any], rank: int = 0, world: int = 1) -> None:
    """Warm up, report that it is ready, then run steps on order until the orders end."""
    losses = [step() for _ in range(WARM_UP)]
    orders, replies = _opened(wire) if rank == 0 else (None, None)
    _together(world)
    if replies is not None:
        _say(replies, {"ready": dict(info), "losses": losses})
    while count := _agreed(_next(orders), world):
        losses = [step() for _ in range(count)]
        _together(world)
        if replies is not None:
            _say(replies, {"losses": losses})


def _opened(wire: str) -> tuple[Any, Any]:
    read, write = map(int, wire.split(","))
    return os.fdopen(read), os.fdopen(write, "w")


def _say(replies: Any, message: Mapping[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _next(orders: Any) -> int:
    """The number of steps to run; 0 if there are no more orders, or on a rank without the pipes."""
    line = orders.readline() if orders is not None else ""
    return int(json.loads(line)["steps"]) if line else 0


def _agreed(count: int, world: int) -> int:
    """The number of steps that rank 0 received, on every rank."""
    if world == 1:
        return count
    import torch
    import torch.distributed as dist

    shared = torch.tensor(count)
    dist.broadcast(shared, 0)
    return int(shared.item())


def _together(world: int) -> None:
    if world > 1:
        import torch.distributed as dist

        dist.barrier()
