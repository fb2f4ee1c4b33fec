"""Measures the links of a node for a fraction of a second each: between processes, to a device, between devices."""

from __future__ import annotations

import mmap
import os
import time

import torch

from runtime.observe.doctor.facts import Links

SIZE_BYTES = 32 << 20
FOR_S = 0.25  # a measurement
DEVICE_BYTES = 256 << 20
ROUNDS = 8


def measure() -> Links:
    """All that this node has."""
    count = torch.cuda.device_count()
    processes = between_processes()
    if not count:
        return Links(processes)
    to_device = _copies(torch.empty(DEVICE_BYTES, dtype=torch.uint8).pin_memory(), torch.device("cuda", 0))
    if count < 2:
        return Links(processes, to_device)
    first = torch.empty(DEVICE_BYTES, dtype=torch.uint8, device="cuda:0")
    slowest = min(_copies(first, torch.device("cuda", index)) for index in range(1, count))
    return Links(processes, to_device, slowest, _all_reduce(count))


def between_processes() -> float:
    """Bytes a second that one process reads of what another wrote into memory that they share."""
    shared, mine = mmap.mmap(-1, SIZE_BYTES + mmap.PAGESIZE), bytearray(SIZE_BYTES)
    turn = SIZE_BYTES  # a byte by which the two take turns: 1 written, 0 read, 2 over
    other = os.fork()
    if other == 0:
        while shared[turn] != 2:
            if shared[turn] == 0:
                shared[:SIZE_BYTES] = mine
                shared[turn] = 1
            os.sched_yield()
        os._exit(0)
    moved, start, seconds = 0, time.monotonic(), 0.0
    while seconds < FOR_S or not moved:
        if shared[turn] == 1:
            mine[:] = memoryview(shared)[:SIZE_BYTES]
            shared[turn] = 0
            moved += SIZE_BYTES
        os.sched_yield()
        seconds = time.monotonic() - start
    while shared[turn] != 1:  # it writes: what it says then would stand over the end
        os.sched_yield()
    shared[turn] = 2
    os.waitpid(other, 0)
    return moved / seconds


def _copies(source: torch.Tensor, to: torch.device) -> float:
    place = torch.empty(source.shape, dtype=source.dtype, device=to)
    place.copy_(source)
    torch.cuda.synchronize(to)
    start = time.monotonic()
    for _ in range(ROUNDS):
        place.copy_(source, non_blocking=True)
    torch.cuda.synchronize(to)
    return ROUNDS * source.nbytes / (time.monotonic() - start)


def _all_reduce(count: int) -> float:
    """Bytes a second of an all-reduce as NCCL counts them on a bus: 2 (n - 1) / n of a tensor, per device."""
    tensors = [torch.ones(DEVICE_BYTES // 4, device=f"cuda:{index}") for index in range(count)]

    def once() -> None:
        torch.cuda.nccl.all_reduce(tensors)
        for index in range(count):
            torch.cuda.synchronize(index)

    once()
    start = time.monotonic()
    for _ in range(ROUNDS):
        once()
    return ROUNDS * 2 * (count - 1) / count * DEVICE_BYTES / (time.monotonic() - start)
