"""A study: variants of a spec, each trained from several seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsl.canonical import canonical
from dsl.load import resolve

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "benchmarks" / "studies" / "study.dsc"
POINTS = 50  # of a curve; each is a mean over a window of steps


@dataclass(frozen=True)
class Variant:
    """A row of a study."""

    name: str  # the key of its runs in the results
    title: str  # in tables
    label: str  # in pictures
    overrides: tuple[str, ...]  # of the spec, as for `-s`
    program: str = ""  # a module that trains it instead of `dsc train`


@dataclass(frozen=True)
class Run:
    """A variant trained from a seed."""

    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant.name}-{self.seed}"


@dataclass(frozen=True)
class Study:
    """Variants of `spec`, each trained from every seed. `overrides` apply to all variants."""

    name: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    spec: Path = SPEC
    overrides: tuple[str, ...] = ()

    def runs(self) -> Iterator[Run]:
        """All runs, seed by seed, so that a stopped study has runs of every variant."""
        for seed in self.seeds:
            yield from (Run(variant, seed) for variant in self.variants)

    def words(self, run: Run) -> tuple[str, ...]:
        """The overrides of a run: those of the study and of its variant, and its seed."""
        return (*self.overrides, *run.variant.overrides, f"train.seed={run.seed}")

    def digest(self, run: Run) -> str:
        """Return the sha256 of the canonical spec and the program of a run. Raises SpecError for an invalid spec."""
        spec = resolve(self.spec, None, self.words(run)).spec
        return hashlib.sha256((run.variant.program + canonical(spec)).encode()).hexdigest()

    @property
    def steps(self) -> int:
        """The number of steps of a run."""
        train = resolve(self.spec, None, self.overrides).spec.train
        return -(-train.tokens // (train.batch.end * train.sequence))


def tenth(steps: int) -> int:
    """The size of the last tenth of a run, in steps or in points of a curve, at least 1."""
    return max(1, steps // 10)


def window_of(steps: int) -> int:
    """The number of steps per point of a curve."""
    return max(1, steps // POINTS)
