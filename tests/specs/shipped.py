"""The specs this repository ships, and what is planned of each, once for all tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from compiler.decide import Lowered, lower_spec
from dsl.chosen import phases_in, runs_in
from dsl.load import load
from dsl.schema import Spec

SPECS = Path(__file__).resolve().parents[2] / "specs"
FILES = tuple(sorted(str(path.relative_to(SPECS)) for path in SPECS.rglob("*.dsc")))
AS_ELSEWHERE = {("deepseek-v3-128k.dsc", "long")}  # its first phase is the run of deepseek-v3.dsc
RUNS = tuple(
    (file, phase)
    for file in FILES
    for run in runs_in(SPECS / file)
    for phase in phases_in(SPECS / file, run)
    if (file, phase) not in AS_ELSEWHERE
)


@cache
def shipped(file: str, run: str | None = None) -> Spec:
    return load(SPECS / file, run)


@cache
def planned(file: str, run: str) -> Lowered:
    return lower_spec(shipped(file, run))
