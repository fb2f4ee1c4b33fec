"""Stage placements: which pipeline rank runs a stage on a micro-batch, and so which ranks hold its parameters.

- `bidirectional`: stage s on rank s for the first half of the micro-batches (direction 0) and on rank P-1-s for the
  rest (direction 1); every stage has two copies. P is even. Of an odd N, direction 0 has one more.
- `v`: rank r holds stages r and 2P-1-r.
- `loop(v)`: stage s on rank s mod P, v stages a rank.

A schedule's stage placement says where its actions run, a plan's which stages each rank holds. They may differ where
the first asks for less: a `loop(1)` schedule runs on a `bidirectional` plan, every micro-batch in direction 0;
`supports` is that rule. Sizes are arguments, as a plan runs schedules of several numbers of micro-batches; `Schedule`
and `Plan` have the same methods for the sizes that they know.
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
    """One of the three forms. `str` gives the text that files have, `parse` is its exact inverse."""

    form: Literal["bidirectional", "v", "loop"]
    loops: int = 0  # the v of `loop(v)`; 0 in the other forms

    def __str__(self) -> str:
        return f"loop({self.loops})" if self.form == "loop" else self.form

    @classmethod
    def parse(cls, text: str) -> StagePlacement:
        """Inverse of `str`; ValueError if the text is none of the three forms."""
        if text == "bidirectional":
            return BIDIRECTIONAL
        if text == "v":
            return V
        match = _LOOP.fullmatch(text)
        if match is None:
            what = f"unknown placement {text[:40]!r}: expected bidirectional, v or loop(2)"
            raise ValueError(f"{what}, of 2 or another number of stages a rank from 1 on")
        return loop(int(match.group(1)))

    @property
    def stages_per_rank(self) -> int:
        """Number of stages of the pipeline for each rank: 1 where a rank has two copies of other stages."""
        return {"bidirectional": 1, "v": 2, "loop": self.loops}[self.form]

    @property
    def copies(self) -> int:
        """Number of ranks that hold each stage."""
        return 2 if self.form == "bidirectional" else 1

    def num_stages(self, num_ranks: int) -> int:
        """Stages of the whole pipeline; ValueError where `num_ranks` does not fit the placement."""
        if num_ranks < 1:
            raise ValueError(f"a pipeline has at least 1 rank, got {num_ranks}")
        if self.form == "bidirectional" and num_ranks % 2:
            raise ValueError(f"placement bidirectional needs an even number of ranks, got {num_ranks}")
        return num_ranks * self.stages_per_rank

    def turn(self, num_micro_batches: int) -> int:
        """The first micro-batch of direction 1; where there is none, more than there are."""
        return (num_micro_batches + 1) // 2 if self.form == "bidirectional" else sys.maxsize

    def direction(self, num_micro_batches: int, micro_batch: int) -> int:
        """0 or 1: from which end a micro-batch enters the pipeline; 1 only under `bidirectional`."""
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
        """Whether every rank that holds its stages by this placement has all that a schedule of `other` runs on it."""
        if self.num_stages(num_ranks) != other.num_stages(num_ranks):
            return False
        return all(
            set(other.stages_of(num_ranks, rank)) <= set(self.stages_of(num_ranks, rank)) for rank in range(num_ranks)
        )


BIDIRECTIONAL = StagePlacement("bidirectional")
V = StagePlacement("v")


def loop(stages_per_rank: int) -> StagePlacement:
    """The placement `loop(v)`, of 1 to `MAX_LOOPS` stages a rank."""
    assert 1 <= stages_per_rank <= MAX_LOOPS, stages_per_rank
    return StagePlacement("loop", stages_per_rank)


ONE_STAGE = loop(1)  # stage s on rank s
