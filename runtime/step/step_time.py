"""Where the time of a rank's steps goes: each moment belongs to one part, so the parts sum to the time.

The clock is the host's. On a CPU that is what the rank does. On a GPU the host queues work for its device, and does not
wait where the device waits. So the parts of communication are told apart on CPUs alone; on a GPU they are in `compute`.

The parts of all ranks travel with the sum of the gradient norm: each rank has places of its own in that vector. What
they say is the time from one such sum to the next, so the update of a step counts to the next row. The most memory that
each rank has held travels with them.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, get_args

import torch
from torch import Tensor

# message: of the pipeline · exchange: between expert, tensor and context ranks, and of weights that data ranks divide ·
# sum: over the world, of gradients, and weights that are gathered behind the update · data: samples that were not there
# in time · generation and reward: all of a rollout, and of its scores, in runs that have them · checkpoint: what a save
# keeps the training · other: between steps
Part = Literal[
    "compute", "message", "exchange", "sum", "data", "generation", "reward", "validation", "checkpoint", "other"
]
PARTS: tuple[Part, ...] = get_args(Part)
COMMUNICATION: tuple[Part, ...] = ("message", "exchange", "sum")
OF_ROLLOUTS: tuple[Part, ...] = ("generation", "reward")
NUMBERS = len(PARTS) + 1  # of a rank: its seconds by parts, and bytes

P = ParamSpec("P")
R = TypeVar("R")


class StepTime:
    """The clock of one rank. It starts with the first part that is entered."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._rank, self._world, self._clock = rank, world, clock
        self._device, self._on_cpu = device, device is None or device.type == "cpu"
        self._ns = dict.fromkeys(PARTS, 0)
        self._part: Part = "other"
        self._since: int | None = None
        self._is_whole = False
        self._sent = self._counted = (0,) * len(PARTS)  # ns at the last sum, and at that of the last row

    def enter(self, part: Part) -> Part:
        """Begin a part; the one before, which the caller enters again."""
        before, now = self._part, self._clock()
        if self._is_whole or (not self._on_cpu and part in COMMUNICATION):
            return before
        self._ns[before] += now - (self._since if self._since is not None else now)
        self._part, self._since = part, now
        return before

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """What is in the block belongs to a part, but for the parts that are entered in it."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def whole(self, part: Part) -> Iterator[None]:
        """All that is in the block belongs to a part."""
        before = self.enter(part)
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            self.enter(before)

    # ---- all ranks

    def beside(self, total: Tensor) -> Tensor:
        """A number of this rank that is to be summed over the world, and behind it the seconds of this rank since the
        last row and the most bytes that it has held, in its places among zeros: float64 [1 + world · NUMBERS]. The host
        does not wait for the device."""
        self.enter(self._part)
        self._sent = tuple(self._ns.values())
        numbers = torch.empty(NUMBERS, dtype=torch.float64, pin_memory=not self._on_cpu)
        numbers.copy_(torch.tensor([*self._since_row(), float(self._peak_bytes())], dtype=torch.float64))
        both = total.new_zeros(1 + self._world * NUMBERS)
        both[:1].copy_(total)
        both[1:].view(self._world, -1)[self._rank].copy_(numbers, non_blocking=True)
        return both

    def row(self, numbers: Sequence[float]) -> dict[str, Any]:
        """What a row of the metrics says, of what was summed over the world behind the number of `beside`. The next row
        begins with that sum."""
        self._counted = self._sent
        of_ranks = [numbers[at : at + NUMBERS] for at in range(0, len(numbers), NUMBERS)]
        ranks = [dict(zip(PARTS, each[:-1], strict=True)) for each in of_ranks]
        left_out = () if self._on_cpu else COMMUNICATION
        if not any(each[part] for each in ranks for part in OF_ROLLOUTS):
            left_out += OF_ROLLOUTS
        parts = [part for part in PARTS if part not in left_out]
        return {
            "spent_s": {part: round(sum(each[part] for each in ranks) / len(ranks), 6) for part in parts},
            "spent_most_s": {part: round(max(each[part] for each in ranks), 6) for part in parts},
            "slowest_rank": max(range(len(ranks)), key=lambda rank: ranks[rank]["compute"]),
            "process_bytes" if self._on_cpu else "memory_bytes": max(int(each[-1]) for each in of_ranks),
        }

    def _peak_bytes(self) -> int:
        """The most bytes that the rank has held so far: of tensors on its device, or on a CPU of its whole process."""
        if self._on_cpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # it is in KiB
        return torch.cuda.max_memory_allocated(self._device)

    def _since_row(self) -> list[float]:
        return [(now - before) / 1e9 for now, before in zip(self._sent, self._counted, strict=True)]


class Clocked(Protocol):
    """What has a clock."""

    time: StepTime


C = TypeVar("C", bound=Clocked)


def takes(part: Part) -> Callable[[Callable[Concatenate[C, P], R]], Callable[Concatenate[C, P], R]]:
    """Mark a method whose time belongs to a part."""

    def mark(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
        @wraps(method)
        def timed(self: C, *args: P.args, **named: P.kwargs) -> R:
            before = self.time.enter(part)
            try:
                return method(self, *args, **named)
            finally:
                self.time.enter(before)

        return timed

    return mark
