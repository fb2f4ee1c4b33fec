"""Reports of real schedules, with a run whose figures are simple functions of the step."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from compiler.predict.planned_step import PlannedStep, planned_step_of
from compiler.predict.predict import memories, predict_timed_plan, time_plan
from compiler.schedule import SCHEDULES
from compiler.schedule.costs import Costs
from compiler.tools.picture.panel import panel_of
from compiler.tools.report.sections import ExpertRow, RankRow, Report, RunFigures, StageLine
from dsl.load import load

SPECS = Path(__file__).parents[4] / "specs"

COSTS = Costs(pairs=(("BF", Fraction(5, 2)),))


def make_report(name: str = "dualpipe", num_ranks: int = 4, num_micro_batches: int = 10, dp: int = 2) -> Report:
    schedule = SCHEDULES[name].generate(num_ranks, num_micro_batches)
    P, mirrored = num_ranks, name == "dualpipe"
    stages = tuple(
        StageLine(s, _holds(s, P), (s, P - 1 - s) if mirrored else (s,), 1_000_000 + 250_000 * s) for s in range(P)
    )
    ranks = tuple(
        RankRow(
            rank=r,
            world_ranks=(r * dp, r * dp + dp - 1),
            stages=tuple(s.index for s in stages if r in s.ranks),
            parameters=(total := sum(s.parameters for s in stages if r in s.ranks)),
            memory=(
                ("parameters", 4 * total),
                ("gradients", 4 * total),
                ("moments", 8 * total),
                ("activations", 30_000_000 - 2_000_000 * r),
            ),
        )
        for r in range(P)
    )
    return Report(
        name="quickstart",
        subtitle=f"tiny_v3 under {name}, {P * dp} processes",
        facts=(
            ("parameters", "8.23M"),
            ("pipeline", str(P)),
            ("data", str(dp)),
            ("expert", "2"),
            ("precision", "fp32"),
        ),
        schedule=panel_of(schedule, COSTS),
        time_unit="forwards of a stage",
        stages=stages,
        ranks=ranks,
        capacity_bytes=4 * 10**9,
        experts=(ExpertRow(0, 0, 7, (0,)), ExpertRow(1, 8, 15, (1,))),
        moe_layers=("L1", "L2", "L3", "mtp"),
        assumptions=("a forward, an input gradient and a weight gradient take one unit each", "links take no time"),
    )


def _holds(stage: int, num_stages: int) -> tuple[str, ...]:
    first = ("embed",) if stage == 0 else ()
    return (*first, f"layer {stage}", *(("mtp", "head") if stage == num_stages - 1 else ()))


def make_run(num_steps: int = 300, every: int = 25) -> RunFigures:
    metrics = []
    for step in range(1, num_steps + 1):
        wave = math.sin(step * 12.9898) * 0.5
        row = {
            "step": step,
            "loss": 4.4 + 3.9 * math.exp(-step / 60) + 0.12 * wave,
            "mtp_loss": 5.0 + 3.3 * math.exp(-step / 70) + 0.1 * wave,
            "grad_norm": 0.7 + 5 * math.exp(-step / 15) + 0.2 * abs(wave),
            "rate": 1e-3 * min(step / 30, 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * step / num_steps))),
            "tokens": step * 2048,
            "tokens_per_s": 3600 + 300 * wave,
            "imbalance": 1.2 + math.exp(-step / 40),
        }
        if step % every == 0:
            row["validation_loss"] = 4.5 + 3.9 * math.exp(-step / 60)
        metrics.append(row)
    load = [[1000 + round(700 * math.sin(7 * e + 3 * layer)) for e in range(16)] for layer in range(4)]
    split = {"files": 700, "documents": 697, "tokens": 3_367_571, "bytes": 11_731_613}
    data = {
        "source": "python_stdlib",
        "tokenizer": {"vocab": 4096},
        "splits": {"train": split, "validation": {"files": 34, "documents": 34, "tokens": 114_362, "bytes": 387_028}},
        "skipped": {"not UTF-8": 2},
        "held_out": ["argparse.py", "json/decoder.py"],
        "unigram_nats": 6.5687,
    }
    return RunFigures(tuple(metrics), data, {"load": load})


@pytest.fixture
def report() -> Report:
    return make_report()


@pytest.fixture
def report_of_run() -> Report:
    return replace(make_report(), run=make_run())


@pytest.fixture(scope="package")
def quickstart_plan() -> PlannedStep:
    """The plan of the quickstart."""
    timed_plan = time_plan(load(SPECS / "quickstart.dsc"))
    return planned_step_of(timed_plan, predict_timed_plan(timed_plan, memories(timed_plan)))
