"""Where the time of a rank's steps goes. Each moment belongs to one part, so the parts sum to the whole time.

The clock is that of the host. On a GPU the host queues work and does not wait where the device waits, so the parts of
communication are measured on CPUs alone; on a GPU they count as `compute`.

The parts of all ranks are summed together with the gradient norm: each rank has its own places in that vector. They
cover the time from one such sum to the next, so the update of a step counts to the next row. The peak memory of each
rank is in the same vector, and what runtime/observe/health/stragglers.py needs to compare ranks.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from runtime.observe.health.stragglers import RankSeconds

# message: of the pipeline · exchange: between expert, tensor and context ranks, and of sharded weights and gradients ·
# sum: over the world, of gradients, and the gather of weights after the update · data: waiting for samples ·
# generation and reward: of rollouts · checkpoint: training waits for a save · other: between steps
Part = Literal[
    "compute", "message", "exchange", "sum", "data", "generation", "reward", "validation", "checkpoint", "other"
]
PARTS: tuple[Part, ...] = get_args(Part)
COMMUNICATION: tuple[Part, ...] = ("message", "exchange", "sum")
OF_ROLLOUTS: tuple[Part, ...] = ("generation", "reward")
COUNTED = len(PARTS) + 2  # since the last row: the seconds of each part, those of uneven work, and the rows of experts
NUMBERS = COUNTED + 2  # of a rank: these, the peak bytes, and those that the allocator reserved

P = ParamSpec("P")
R = TypeVar("R")


class StepTime:
    """The clock of one rank. It starts with the first part that is entered.

    `works`: the work of each rank in the last row, equal on all ranks. On a GPU it is meaningless, as the host counts
    communication as `compute`.
    """

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
        self._uneven_ns = self._expert_rows = 0
        self._sent = self._counted = (0,) * COUNTED  # at the last sum, and at the sum of the last row; times in ns
        self.works: tuple[RankSeconds, ...] = ()

    def enter(self, part: Part) -> Part:
        """Begin a part. Return the part before, which the caller re-enters."""
        previous, now_ns = self._part, self._clock()
        if self._is_whole or (not self._on_cpu and part in COMMUNICATION):
            return previous
        self._ns[previous] += now_ns - (self._since if self._since is not None else now_ns)
        self._part, self._since = part, now_ns
        return previous

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Count the time of the block as a part, except for parts that are entered inside."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def count_block(self, part: Part) -> Iterator[None]:
        """Count the whole time of the block as a part."""
        before = self.enter(part)
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            self.enter(before)

    @contextmanager
    def count_uneven(self) -> Iterator[None]:
        """Also count the computation of the block as uneven work: of whole matrices that one rank updates, for
        example."""
        self.enter(self._part)
        before_ns = self._ns["compute"]
        try:
            yield
        finally:
            self.enter(self._part)
            self._uneven_ns += self._ns["compute"] - before_ns

    def count_expert_rows(self, rows: int) -> None:
        """Count rows that the experts of this rank compute, except in a block whose whole time is counted."""
        if self._on_cpu and not self._is_whole:
            self._expert_rows += rows

    # ---- all ranks

    def pack_numbers(self, total: Tensor) -> Tensor:
        """Return a vector to sum over the world: `total`, then what was counted since the last row and the bytes in the
        places of this rank, zeros elsewhere. float64 [1 + world · NUMBERS]. The host does not wait for the device."""
        self.enter(self._part)
        self._sent = (*self._ns.values(), self._uneven_ns, self._expert_rows)
        numbers = torch.empty(NUMBERS, dtype=torch.float64, pin_memory=not self._on_cpu)
        numbers.copy_(torch.tensor([*self._counted_since_row(), *map(float, self._peak_bytes())], dtype=torch.float64))
        totals = total.new_zeros(1 + self._world * NUMBERS)
        totals[:1].copy_(total)
        totals[1:].view(self._world, -1)[self._rank].copy_(numbers, non_blocking=True)
        return totals

    def row(self, numbers: Sequence[float]) -> dict[str, Any]:
        """Return the columns of a metrics row from the summed vector of `pack_numbers`, without its first number. The
        time of the next row begins with that sum."""
        self._counted = self._sent
        of_ranks = [numbers[first : first + NUMBERS] for first in range(0, len(numbers), NUMBERS)]
        ranks = [dict(zip(PARTS, of_rank[: len(PARTS)], strict=True)) for of_rank in of_ranks]
        self.works = tuple(
            _work(seconds, *of_rank[len(PARTS) : COUNTED]) for seconds, of_rank in zip(ranks, of_ranks, strict=True)
        )
        left_out = () if self._on_cpu else COMMUNICATION
        if not any(seconds[part] for seconds in ranks for part in OF_ROLLOUTS):
            left_out += OF_ROLLOUTS
        parts = [part for part in PARTS if part not in left_out]
        return {
            "spent_s": {part: round(sum(seconds[part] for seconds in ranks) / len(ranks), 6) for part in parts},
            "spent_most_s": {part: round(max(seconds[part] for seconds in ranks), 6) for part in parts},
            "slowest_rank": max(range(len(ranks)), key=lambda rank: ranks[rank]["compute"]),
            **{
                kind: max(int(of_rank[COUNTED + index]) for of_rank in of_ranks)
                for index, kind in enumerate(("process_bytes",) if self._on_cpu else ("memory_bytes", "reserved_bytes"))
            },
        }

    def _peak_bytes(self) -> tuple[int, int]:
        """Return the peak bytes so far: of tensors on the device, and of segments that torch's allocator reserved for
        them; on a CPU of the whole process, and 0."""
        if self._on_cpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0  # it is in KiB
        return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)

    def _counted_since_row(self) -> list[float]:
        """Return the seconds of each part and of uneven work, and the rows of experts."""
        *times_ns, rows = (sent - counted for sent, counted in zip(self._sent, self._counted, strict=True))
        return [*(time_ns / 1e9 for time_ns in times_ns), float(rows)]


def _work(seconds: Mapping[Part, float], uneven_s: float, expert_rows: float) -> RankSeconds:
    """Return the work of a rank from its seconds by part. `uneven_s`: computation that peers do not share evenly."""
    return RankSeconds(
        compute_s=seconds["compute"] - uneven_s,
        data_s=seconds["data"],
        message_s=seconds["message"],
        exchange_s=seconds["exchange"],
        wall_s=sum(seconds.values()),
        expert_rows=int(expert_rows),
    )


class HasStepTime(Protocol):
    """An object with a clock."""

    time: StepTime


C = TypeVar("C", bound=HasStepTime)


def count_as(part: Part) -> Callable[[Callable[Concatenate[C, P], R]], Callable[Concatenate[C, P], R]]:
    """Decorate a method whose time counts as a part."""

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
