"""The contestant's side of the arena: prepare, warm up, then run steps when told.

Orders come and replies go as lines of JSON through two pipes, whose descriptors are given as `--wire READ,WRITE`. With
several ranks, rank 0 holds the wire and tells the others through the process group, where they wait without work.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

WARM_UP = 4  # steps; the first of them is compared between contestants

Step = Callable[[], float | None]  # one training step; its loss


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def serve(wire: str, step: Step, info: Mapping[str, Any], rank: int = 0, world: int = 1) -> None:
    """Warm up, say so, then take steps as ordered until the orders end."""
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
    """The number of steps to take; 0 when there are no more orders, or on a rank that has no wire."""
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
