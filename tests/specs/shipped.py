"""The specs this repository ships, and what is planned of each, once for all tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from compiler.decide import Lowered, lower_spec
from dsl.load import load, runs_in
from dsl.schema import Spec

SPECS = Path(__file__).resolve().parents[2] / "specs"
FILES = tuple(sorted(str(path.relative_to(SPECS)) for path in SPECS.rglob("*.dsc")))
RUNS = tuple((file, run) for file in FILES for run in runs_in(SPECS / file))


@cache
def shipped(file: str, run: str | None = None) -> Spec:
    return load(SPECS / file, run)


@cache
def planned(file: str, run: str) -> Lowered:
    return lower_spec(shipped(file, run))
