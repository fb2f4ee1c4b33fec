"""The specs that this repository ships, and their plans, computed once for all tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from compiler.pipeline import lower_spec
from compiler.program.lowered import LoweredPlan
from dsl.load import load
from dsl.resolve.chosen import phases_in, runs_in
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
# Of the runs of the files in the folder itself: `quickstart`, and `r1-tiny:r1` where a file has several.
NAMES = tuple(
    path.stem if len(runs) == 1 else f"{path.stem}:{run}"
    for path in sorted(SPECS.glob("*.dsc"))
    for runs in [runs_in(path)]
    for run in runs
)


def path_of(name: str) -> str:
    """The command-line argument for one of NAMES."""
    stem, colon, run = name.partition(":")
    return f"{SPECS / stem}.dsc{colon}{run}"


@cache
def shipped(file: str, run: str | None = None) -> Spec:
    return load(SPECS / file, run)


@cache
def planned(file: str, run: str) -> LoweredPlan:
    return lower_spec(shipped(file, run))
