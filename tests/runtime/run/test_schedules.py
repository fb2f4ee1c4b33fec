"""All schedules, executed: in float64 they give the results of plain autograd, and run in the planned order.

The small model has every part of DeepSeek-V3, including MTP's tied embedding and head: with a V, these are on the rank
of the main ones, else on two or more ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from compiler.emit.segment_cache import Segments
from compiler.ir.stage_placement import ONE_STAGE, V
from compiler.plan.spec_files import with_schedule
from compiler.schedule import AUTO, SCHEDULES
from compiler.schedule.schedule import Schedule as Order
from dsl.facts.schedules import CHUNKED
from dsl.schema import LayerRange, ScheduleBlock, Spec
from tests.compiler.program.proof.pairs import kinds_of_pairs, paired
from tests.runtime.step.specs import spec
from tests.runtime.step.test_differential import STEPS, check

COUNTS = {name: next(n for n in (3, 5, 4) if row.has_size(2, n)) for name, row in SCHEDULES.items()}
NAMED = [*(COUNTS | {"interleaved": 4}).items(), (AUTO, 3), (AUTO, 6)]  # and micro-batches on two ranks
OVER_FOUR = [("zbv", 5, 1), ("interleaved", 4, 1), ("dualpipev", 4, 2)]  # micro-batches and columns
PAIRS = [("zbv", 3), ("gpipe", 3)]


def small(name: str, ranks: int, micro_batches: int, layers: int, columns: int = 1) -> Spec:
    """`layers`: of the model, without MTP's. `columns`: data and expert ranks of each pipeline rank."""
    base = spec(ranks, columns, columns, micro_batches, STEPS, zero=int(columns > 1))
    dense, moe = base.model.layers
    model = base.model.model_copy(update={"layers": (dense, LayerRange(first=1, last=layers - 1, ffn=moe.ffn))})
    schedule = ScheduleBlock(name=name, chunks=2 if name in CHUNKED else None)
    return base.model_copy(update={"model": model, "schedule": schedule})


def test_on_two_ranks(tmp_path: Path, segments: Segments) -> None:
    specs = {f"{name}_{n}": small(name, 2, n, layers=4) for name, n in NAMED}
    assert {name for name, _ in NAMED} == {*SCHEDULES, AUTO}
    check(tmp_path, segments, specs, 2)
    for name, n in NAMED:
        order = of_build(tmp_path, f"{name}_{n}")
        assert name == AUTO or order == SCHEDULES[name].generate(2, n)
        assert executed(tmp_path, f"{name}_{n}", 2) == planned(order)


def test_on_three_ranks(tmp_path: Path, segments: Segments) -> None:
    """Searched schedules where stages cannot be mirrored: a V of six stages, or three stages with too few layers."""
    specs = {f"auto_{layers}": small(AUTO, 3, 4, layers) for layers in (4, 3)}
    check(tmp_path, segments, specs, 3)
    for layers, placement in ((4, V), (3, ONE_STAGE)):
        order = of_build(tmp_path, f"auto_{layers}")
        assert (order.name, order.stage_placement) == (AUTO, placement)
        assert executed(tmp_path, f"auto_{layers}", 3) == planned(order)


def test_on_four_ranks(tmp_path: Path, segments: Segments) -> None:
    """Eight stages, in a ring and in a V; and a V of two pipeline ranks with two expert ranks each."""
    specs = {f"{name}_{n}": small(name, 4 // columns, n, 7, columns) for name, n, columns in OVER_FOUR}
    check(tmp_path, segments, specs, 4)
    for name, n, columns in OVER_FOUR:
        rows = planned(SCHEDULES[name].generate(4 // columns, n))
        assert executed(tmp_path, f"{name}_{n}", 4) == [row for row in rows for _ in range(columns)]


def test_on_one_rank(tmp_path: Path, segments: Segments) -> None:
    """Two stages on the only rank: all messages stay there."""
    check(tmp_path, segments, {f"{name}_3": small(name, 1, 3, layers=2) for name in ("zbv", "interleaved")}, 1)


@pytest.mark.parametrize(("name", "n"), PAIRS)
def test_any_pairs(tmp_path: Path, segments: Segments, name: str, n: int) -> None:
    """Pairs of all kinds, in a user's schedule."""
    order = paired(SCHEDULES[name].generate(2, n))
    assert kinds_of_pairs(order).keys() & {"FF", "BB", "IW", "WW"}
    chosen = small(name, 2, n, layers=4).model_copy(update={"schedule": ScheduleBlock(file="mine.schedule")})
    check(tmp_path, segments, {"pairs": with_schedule(chosen, order)}, 2)
    assert executed(tmp_path, "pairs", 2) == planned(order)


def of_build(folder: Path, build: str) -> Order:
    return Order.from_text((folder / "builds" / build / "schedule.txt").read_text("utf-8"))


def planned(order: Order) -> list[list[str]]:
    return [[str(step) for step in row] for row in order.actions]


def executed(folder: Path, build: str, ranks: int) -> list[list[str]]:
    """The actions of each rank in its trace, in order. Asserts equal steps and no overlapping actions."""
    rows = [lines(folder / "out" / build / "trace" / f"rank_{rank}.jsonl") for rank in range(ranks)]
    for row in rows:
        assert [line["step"] for line in row] == list(range(1, STEPS + 1))
        assert len({line["program"] for line in row}) == 1 and row[0]["program"].startswith("train_")
        for line in row:
            times = [time for _, start, end in line["actions"] for time in (start, end)]
            assert times == sorted(times)
            assert labels(line) == labels(row[0])
    return [labels(row[0]) for row in rows]


def labels(line: dict[str, Any]) -> list[str]:
    return [label for label, _, _ in line["actions"]]


def lines(path: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
