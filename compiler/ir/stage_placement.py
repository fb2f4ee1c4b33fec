"""Stage placements: which pipeline rank runs a stage on a micro-batch, and so which ranks hold its parameters.

With P pipeline ranks:

- `bidirectional`: stage s on rank s for the first half of the micro-batches (direction 0) and on rank P-1-s for the
  rest (direction 1); every stage has two copies. P is even. With an odd number, direction 0 has one more.
- `v`: rank r holds stages r and 2P-1-r.
- `loop(v)`: stage s on rank s mod P, v stages per rank.

A schedule's placement says where its actions run, a plan's which stages each rank holds. They may differ if the
schedule needs fewer: a `loop(1)` schedule runs on a `bidirectional` plan with every micro-batch in direction 0
(`supports`). Sizes are arguments because a plan runs schedules of several numbers of micro-batches. `Schedule` and
`Plan` have the same methods without these arguments.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Literal

_LOOP = re.compile(r"loop\(([1-9][0-9]{0,3})\)")
MAX_LOOPS = 9999


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """One of the three forms. `str` gives the text in files; `parse` is its exact inverse."""

    form: Literal["bidirectional", "v", "loop"]
    loops: int = 0  # the v of `loop(v)`; 0 in the other forms

    def __str__(self) -> str:
        return f"loop({self.loops})" if self.form == "loop" else self.form

    @classmethod
    def parse(cls, text: str) -> StagePlacement:
        """Inverse of `str`. Raises ValueError for any other text."""
        if text == "bidirectional":
            return BIDIRECTIONAL
        if text == "v":
            return V
        match = _LOOP.fullmatch(text)
        if match is None:
            message = f"unknown placement {text[:40]!r}: expected bidirectional, v or loop(N)"
            raise ValueError(f"{message}, where N is the number of stages per rank, such as loop(2)")
        return loop(int(match.group(1)))

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages divided by ranks. It is 1 for `bidirectional`, where a rank holds copies of two."""
        return {"bidirectional": 1, "v": 2, "loop": self.loops}[self.form]

    @property
    def copies(self) -> int:
        """Number of ranks that hold each stage."""
        return 2 if self.form == "bidirectional" else 1

    def num_stages(self, num_ranks: int) -> int:
        """Stages of the whole pipeline. Raises ValueError if `num_ranks` does not fit the placement."""
        if num_ranks < 1:
            raise ValueError(f"a pipeline has at least 1 rank, got {num_ranks}")
        if self.form == "bidirectional" and num_ranks % 2:
            raise ValueError(f"placement bidirectional needs an even number of ranks, got {num_ranks}")
        return num_ranks * self.stages_per_rank

    def turn(self, num_micro_batches: int) -> int:
        """The first micro-batch of direction 1; if there is none, a number above all micro-batches."""
        return (num_micro_batches + 1) // 2 if self.form == "bidirectional" else sys.maxsize

    def direction(self, num_micro_batches: int, micro_batch: int) -> int:
        """The end at which a micro-batch enters the pipeline, 0 or 1; 1 only under `bidirectional`."""
        return int(micro_batch >= self.turn(num_micro_batches))

    def rank_of(self, num_ranks: int, num_micro_batches: int, stage: int, micro_batch: int) -> int:
        """The pipeline rank that runs `stage` on `micro_batch`."""
        if self.form == "v":
            return min(stage, 2 * num_ranks - 1 - stage)
        if micro_batch >= self.turn(num_micro_batches):
            return num_ranks - 1 - stage
        return stage % num_ranks

    def stages_of(self, num_ranks: int, rank: int) -> tuple[int, ...]:
        """The stages whose parameters a pipeline rank holds, ascending."""
        if self.form == "bidirectional":
            return tuple(sorted((rank, num_ranks - 1 - rank)))
        if self.form == "v":
            return (rank, 2 * num_ranks - 1 - rank)
        return tuple(range(rank, self.num_stages(num_ranks), num_ranks))

    def ranks_of_stage(self, num_ranks: int, stage: int) -> tuple[int, ...]:
        """The pipeline ranks that hold a stage, that of direction 0 first."""
        return tuple(dict.fromkeys(self.rank_of(num_ranks, 2, stage, micro_batch) for micro_batch in (0, 1)))

    def supports(self, other: StagePlacement, num_ranks: int) -> bool:
        """Whether every rank that holds stages by this placement holds all that a schedule with `other` runs on it."""
        if self.num_stages(num_ranks) != other.num_stages(num_ranks):
            return False
        return all(
            set(other.stages_of(num_ranks, rank)) <= set(self.stages_of(num_ranks, rank)) for rank in range(num_ranks)
        )


BIDIRECTIONAL = StagePlacement("bidirectional")
V = StagePlacement("v")


def loop(stages_per_rank: int) -> StagePlacement:
    """The placement `loop(v)` with 1 to `MAX_LOOPS` stages per rank."""
    assert 1 <= stages_per_rank <= MAX_LOOPS, stages_per_rank
    return StagePlacement("loop", stages_per_rank)


ONE_STAGE = loop(1)  # stage s on rank s
