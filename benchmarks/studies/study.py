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
POINTS = 50  # of a curve: means over windows of steps


@dataclass(frozen=True)
class Variant:
    """What one row of a study is: overrides of the spec as after `-s`, and what a page says of it.

    `name` is the key of its runs in the results, `title` its name in tables, `label` the one in pictures. `program`: a
    module that trains it instead of `dsc train`.
    """

    name: str
    title: str
    label: str
    overrides: tuple[str, ...]
    program: str = ""


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
    """Variants of `spec`, each trained from every seed. `overrides` are those of all variants."""

    name: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    spec: Path = SPEC
    overrides: tuple[str, ...] = ()

    def runs(self) -> Iterator[Run]:
        """Seed by seed, so that a study that was stopped has some of every variant."""
        for seed in self.seeds:
            yield from (Run(variant, seed) for variant in self.variants)

    def words(self, run: Run) -> tuple[str, ...]:
        """Overrides of a run: those of the study, of its variant, and its seed."""
        return (*self.overrides, *run.variant.overrides, f"train.seed={run.seed}")

    def digest(self, run: Run) -> str:
        """Return the sha256 of what a spec says, and of the program of a run. Raises SpecError for a wrong spec."""
        spec = resolve(self.spec, None, self.words(run)).spec
        return hashlib.sha256((run.variant.program + canonical(spec)).encode()).hexdigest()

    @property
    def steps(self) -> int:
        """Steps of a run."""
        train = resolve(self.spec, None, self.overrides).spec.train
        return -(-train.tokens // (train.batch.end * train.sequence))


def tenth(steps: int) -> int:
    """The last steps of a run that tables are about, of all of them or of the points of a curve."""
    return max(1, steps // 10)


def window_of(steps: int) -> int:
    """Steps of which a curve has one point."""
    return max(1, steps // POINTS)
