"""The moving average of the weights: on the host, updated during the next step, by the owners of the weights.

After step t it is a(t) = decay · a(t−1) + (1 − decay) · w(t), with a(0) = w(0). Each product and each sum is rounded
separately, so results are bit-identical for any sharding and any block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from runtime.contract import EmaRecipe
from runtime.state.state import FlatBucket, OwnedPiece, State, host_zeros

BLOCK = 2**16  # elements at a time: 0.5 MiB in FP32 with temporaries, so that they stay in the cache


class MovingAverage:
    """The average of the weights that a rank owns. Between `start` and `wait` a thread reads weights and updates it.

    `part`: elements copied from a device at a time. `validated`: whether `swap_into_weights` will be used.
    """

    def __init__(self, state: State, ema: EmaRecipe, part: int, validated: bool) -> None:
        self._state, self._decay, self._part = state, ema.decay, part
        self._thread = ThreadPoolExecutor(1, "moving average")
        self._pending: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None
        if state.device.type == "cuda":
            self._stream = torch.cuda.Stream(state.device)
        self.staged = self._room()
        self.weights = [host_zeros(_size(p), b.parameters.dtype, state.device) for b, p in self._pieces] * validated

    @property
    def _pieces(self) -> list[tuple[FlatBucket, OwnedPiece]]:
        return [(bucket, piece) for bucket in self._state.buckets for piece in bucket.owned]

    def _room(self) -> Tensor | None:
        """Allocate a host buffer for weights from a device; None if weights are on the host."""
        masters = [piece.master for _, piece in self._pieces if piece.master.device.type != "cpu"]
        if not masters:
            return None
        largest = max(_size(piece) for _, piece in self._pieces)
        return host_zeros(min(largest, self._part), masters[0].dtype, self._state.device)

    def start(self) -> None:
        """Start to add the weights to the average in a thread. The weights must not change until `wait`."""
        self.wait()
        after = torch.cuda.current_stream(self._state.device).record_event() if self._stream else None
        self._pending = self._thread.submit(self._update, after)

    def wait(self) -> None:
        """Return when the update of the last `start` is done. Raises its error, if it failed."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _update(self, after: torch.cuda.Event | None) -> None:
        if self._stream and after:
            self._stream.wait_event(after)
        for _, piece in self._pieces:
            average = piece.average
            assert average is not None, "the run keeps an average"
            room = _size(piece) if self.staged is None else self.staged.numel()
            for start in range(0, _size(piece), room):
                part = slice(start, min(start + room, _size(piece)))
                weights = self._copy_to_host(piece.master[part])
                for mean, new in zip(average[part].split(BLOCK), weights.split(BLOCK), strict=True):
                    mean.mul_(self._decay).add_(new.to(mean.dtype) * (1 - self._decay))

    def _copy_to_host(self, weights: Tensor) -> Tensor:
        if self.staged is None:
            return weights
        staged = self.staged[: weights.numel()]
        if self._stream is None:
            return staged.copy_(weights)
        with torch.cuda.stream(self._stream):
            staged.copy_(weights, non_blocking=True)
        self._stream.synchronize()
        return staged

    @contextmanager
    def swap_into_weights(self, gather: Callable[[], object]) -> Iterator[None]:
        """Inside the block, segments read the average, rounded to their dtype. `gather` all-gathers the shards."""
        self.wait()
        for (bucket, piece), saved in zip(self._pieces, self.weights, strict=True):
            assert piece.average is not None
            saved.copy_(bucket.weights_of(piece.part))
            self._write(bucket, piece, piece.average)
        gather()
        yield
        for (bucket, piece), saved in zip(self._pieces, self.weights, strict=True):
            self._write(bucket, piece, saved)
        gather()

    def _write(self, bucket: FlatBucket, piece: OwnedPiece, values: Tensor) -> None:
        """Write values of a piece into the weights that segments read, rounded on the host part by part."""
        for target, part in zip(bucket.weights_of(piece.part).split(self._part), values.split(self._part), strict=True):
            target.copy_(part.to(target.dtype))


def _size(piece: OwnedPiece) -> int:
    return piece.part.stop - piece.part.start
