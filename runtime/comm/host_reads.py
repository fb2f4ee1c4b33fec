"""Numbers of a device that its host must know: the counts of rows by which it takes memory and starts exchanges."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Given(Protocol):
    """What a tensor comes from, or is made of, by who waits for it."""

    def wait(self) -> torch.Tensor: ...


class HostReads:
    """Reads small tensors of a device on the host.

    The host waits for what gives a tensor, on a stream of its own, and so not for the compute that was queued since.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type != "cpu" else None

    def read(self, pending: Given) -> Any:
        """Wait for a tensor; its numbers."""
        if self._stream is None:
            return pending.wait().tolist()
        with torch.cuda.stream(self._stream):
            tensor = pending.wait()
            numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            numbers.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return numbers.tolist()
