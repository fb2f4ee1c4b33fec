"""Counts of a step's work, which do not depend on the machine's speed. `--bless` rewrites counts.json; read its diff.

Dispatches of torch and allocations are CPU overhead. A change that adds any to a step fails here. A step on only torch
has separate counts.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.load import load
from dsl.schema import Spec
from runtime.ops.native import library
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import spec as small

SPECS = Path(__file__).parents[2] / "specs"
GOLDEN = Path(__file__).parent / "counts.json"
# Small, and with every kind of communication.
FOUR_RANKS = small(2, 2, 2, 4, precision="fp32")


def counts_of(folder: Path, segments: Segments, spec: Spec, world: int, *only: str) -> list[list[dict[str, int]]]:
    """Counts of each rank, for one step and for the next."""
    write_build(folder / "build", compile_spec(spec, segments=segments).files)
    run_module("tests.runtime.counts", folder, world, *only)
    return [json.loads((folder / f"rank_{rank}.json").read_text("utf-8")) for rank in range(world)]


def ops_of_segments(build: Path) -> dict[str, int]:
    """Calls in every function of every emitted segment, by names without their digests."""
    counts: Counter[str] = Counter()
    for path in sorted((build / "segments").glob("*.py")):
        for function in ast.parse(path.read_text("utf-8")).body:
            if isinstance(function, ast.FunctionDef):
                calls = sum(isinstance(node, ast.Call) for node in ast.walk(function))
                counts[f"ops of {path.stem.rpartition('_')[0]}.{function.name}"] += calls
    return dict(counts)


def check(name: str, found: dict[str, int], bless: bool) -> None:
    golden = json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.is_file() else {}
    if bless:
        GOLDEN.write_text(json.dumps(golden | {name: found}, indent=1, sort_keys=True) + "\n", "utf-8")
        return
    expected = golden[name]
    changed = [key for key in sorted({*expected, *found}) if expected.get(key) != found.get(key)]
    table = "\n".join(f"  {key:<60} {expected.get(key, '–'):>14} → {found.get(key, '–'):>14}" for key in changed)
    assert not changed, f"{name}: counts of a step changed; `--bless` keeps the new ones\n{table}"


@pytest.mark.parametrize("ops", ["C++", "torch"])
@pytest.mark.parametrize(("name", "world"), [("tiny", 1), ("bench-4", 2)])
def test_counts_of_a_step(
    tmp_path: Path, segments: Segments, name: str, world: int, ops: str, bless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSC_OPS", "torch" if ops == "torch" else "")
    assert ops == "torch" or library.missing() is None, "these counts need the C++ of the ops"
    counts: dict[str, int] = {}
    for rank, (step, after) in enumerate(counts_of(tmp_path, segments, load(SPECS / f"{name}.dsc"), world)):
        assert step == after, f"rank {rank}: a step does what the one before it did"
        counts |= {f"rank {rank} {key}": value for key, value in step.items()}
    check(f"{name} by {ops}", counts, bless)
    check(f"{name}, segments", ops_of_segments(tmp_path / "build"), bless)


def test_bytes_that_ranks_move(tmp_path: Path, segments: Segments, bless: bool) -> None:
    ranks = counts_of(tmp_path, segments, FOUR_RANKS, 4, "bytes")
    totals: list[Counter[str]] = [Counter(), Counter()]
    for steps in ranks:
        for total, step in zip(totals, steps, strict=True):
            total.update({key: value for key, value in step.items() if key.startswith("moved")})
    assert totals[0] == totals[1]
    check("four ranks", dict(totals[0]), bless)


def test_a_changed_count_fails_with_the_old_and_new_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "GOLDEN", tmp_path / "counts.json")
    check("one", {"dispatches": 3, "allocations": 1, "calls": 5}, bless=True)
    check("other", {}, bless=True)
    check("one", {"dispatches": 3, "allocations": 1, "calls": 5}, bless=False)
    with pytest.raises(AssertionError) as caught:
        check("one", {"dispatches": 4, "copies": 2, "calls": 5}, bless=False)
    rows = [line.split() for line in str(caught.value).splitlines() if "→" in line]
    assert rows == [["allocations", "1", "→", "–"], ["copies", "–", "→", "2"], ["dispatches", "3", "→", "4"]]
