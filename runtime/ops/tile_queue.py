"""The counter from which the programs of a launch draw their tiles (compiler/emit/kernels/queue.j2)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def tile_queue(device: torch.device) -> Tensor:
    """The queue of a launch on the current stream: [4] int32, all 0. The launch counts in the first and leaves 0.

    Launches of one stream run one after another and share a queue; other streams have others, for launches of theirs
    may overlap. A CUDA graph may be replayed on any stream, so each launch in it has its own, which the graph clears.
    Four numbers, as a launch whose tensors begin and end at 16 bytes loads 16 bytes at a time.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    return _of_stream(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _of_stream(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(4, dtype=torch.int32, device=device)
