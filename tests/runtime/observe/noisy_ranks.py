"""Seconds of the ranks of a simulated run on a noisy machine, for tests of stragglers.

The work of a rank in a row is that of its pipeline rank, times three factors of noise:

- of the whole machine: lognormal with deviation 0.1, and correlation 0.9 from row to row;
- of the rank: lognormal, and correlation 0.4 from row to row;
- of bursts of the rank: a factor of 1.1 and more, Pareto with exponent 2, for 1 to 6 rows, 2 on average.

Runs of `specs/quickstart.dsc` were recorded on two shared cores, of 80 steps of 0.2 s. The logarithm of the ratio of a
rank to its peers had these robust deviations: 0.03 with two data-parallel ranks; 0.05 to 0.06 with four; 0.08 to 0.11
with four ranks of two pipeline stages. Beside two processes that use both cores they were 0.10 to 0.19. The correlation
from row to row was at most 0.4, and of one to ten rows in a hundred the ratio was above 1.3.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.contract import Mesh
from runtime.observe.health.stragglers import RankSeconds

COMMON, OWN = 0.9, 0.4  # correlations from row to row
LENGTHENED, LONGEST_BURST = 0.3, 6  # share of bursts that last for another row; rows
IDLE_S = 0.01  # of a step, besides work and waiting


class Noise(NamedTuple):
    """Deviation of a rank, and its bursts per row."""

    sigma: float
    bursts: float


QUIET, SHARED, BUSY = Noise(0.03, 0.01), Noise(0.06, 0.03), Noise(0.11, 0.06)


def _rows_of_burst(draw: random.Random) -> int:
    rows = 1
    while rows < LONGEST_BURST and draw.random() < LENGTHENED:
        rows += 1
    return rows


@dataclass
class Slowdown:
    """From a row on, `rank` takes `factor` times as long to compute, or for what `part` says."""

    rank: int
    factor: float
    first: int = 0
    end: int = 10**9
    part: str = "compute"


@dataclass
class NoisyRanks:
    """A run. `seconds`: the work of a rank in a row, about. `slow`: what is wrong with ranks."""

    mesh: Mesh
    noise: Noise
    draw: random.Random
    slow: list[Slowdown] = field(default_factory=list)
    seconds: float = 0.4

    def rows(self, count: int) -> Iterator[list[RankSeconds]]:
        world, draw = self.mesh.world, self.draw
        stages = [self.seconds * draw.uniform(0.6, 1.6) for _ in range(self.mesh.pp)]
        common, own, burst, left = 0.0, [0.0] * world, [1.0] * world, [0] * world
        for row in range(count):
            common = COMMON * common + math.sqrt(1 - COMMON**2) * draw.gauss(0, 0.1)
            work_s, data_s, link_s = list[float](), [0.0] * world, [0.0] * world
            for rank in range(world):
                own[rank] = OWN * own[rank] + math.sqrt(1 - OWN**2) * draw.gauss(0, self.noise.sigma)
                if left[rank] == 0 and draw.random() < self.noise.bursts:
                    left[rank], burst[rank] = _rows_of_burst(draw), 1.1 * draw.paretovariate(2)
                factor = burst[rank] if left[rank] else 1.0
                left[rank] = max(0, left[rank] - 1)
                work_s.append(stages[rank // self.mesh.columns] * math.exp(common + own[rank]) * factor)
            for fault in self.slow:
                if fault.first <= row < fault.end:
                    excess_s = (fault.factor - 1) * work_s[fault.rank]
                    if fault.part == "compute":
                        work_s[fault.rank] += excess_s
                    else:
                        (data_s if fault.part == "data" else link_s)[fault.rank] += excess_s
            wall_s = max(sum(parts) for parts in zip(work_s, data_s, link_s, strict=True)) + IDLE_S
            yield [
                RankSeconds(
                    compute_s=work,
                    data_s=data,
                    message_s=link + draw.uniform(0.2, 0.4) * (wall_s - work - data - link) * (self.mesh.pp > 1),
                    exchange_s=0.0,
                    wall_s=wall_s,
                )
                for work, data, link in zip(work_s, data_s, link_s, strict=True)
            ]
