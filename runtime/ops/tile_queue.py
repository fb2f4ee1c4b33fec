"""The counter from which the programs of a kernel launch take their tiles (compiler/emit/kernels/queue.j2)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def tile_queue(device: torch.device) -> Tensor:
    """Return the queue for a launch on the current stream: [4] int32, all 0. The launch counts in the first element and
    resets it to 0.

    Launches on one stream run one after another and share a queue. Launches on different streams may overlap, so each
    stream has its own queue. A CUDA graph may be replayed on any stream, so each launch in a graph has its own queue,
    which the graph clears. It has four elements because kernels whose tensors are aligned to 16 bytes load 16 bytes at
    a time.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    return _of_stream(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _of_stream(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(4, dtype=torch.int32, device=device)
