"""Real runs with a slow rank: it is named, and with `exclude` the run goes on without its device."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint.publish import Publisher
from runtime.checkpoint.shard_manifest import CheckpointError
from runtime.observe.watch.view import event_line
from runtime.step.trainer import Trainer
from tests.compiler.cli.forms import FORMS, faults
from tests.runtime.run.place import DENSE, FOUR_RANKS, ONE_RANK, Place, rows, saved
from tests.runtime.run.sick import Fault, events, said, train
from tests.runtime.run.test_elastic import starts

SLOW, STEP_S, STEPS = 1, 0.15, 22
TWO = dict(FOUR_RANKS, pipeline=1, expert=1, schedule="1f1b", devices=2, model=DENSE, steps=60)
WARN, EXCLUDE = "health { rerun = false }", "health { straggler = exclude, rerun = false }"


def slowed(factors: dict[int, float], world: int) -> Fault:
    """In a run of `world` ranks, the first body of each rank computes until `STEP_S` has passed, times its factor. It
    passes by the clock of the rank, which waits for as long: a machine with few cores runs all ranks at once."""

    def fault(trainer: Trainer) -> None:
        if trainer.plan.mesh.world != world:
            return
        body = next(iter(trainer.bodies))
        first, late_ns = trainer.bodies[body], 0
        micro_batches = trainer.plan.train.batch.end // trainer.plan.mesh.dp
        extra_s = STEP_S * factors.get(trainer.rank, 1.0) / micro_batches
        trainer.time._clock = lambda: time.perf_counter_ns() + late_ns

        def slow(*args: Any) -> None:
            nonlocal late_ns
            first(*args)
            late_ns += round(extra_s * 1e9)

        trainer.bodies |= {body: slow}

    return fault


class StragglerRuns:
    """Runs in one place, all on the same text."""

    def __init__(self, place: Place) -> None:
        self.place = place
        place.compile(dict(ONE_RANK, name="text", model=DENSE))
        place.dsc("train", "tiny.dsc", "--out", "text", "--steps", 1)
        (self.corpus,) = (path.parent for path in (place.folder / "text" / "data").glob("*/meta.json"))

    def train(self, settings: dict[str, Any], name: str, *wrong: Fault, steps: int = STEPS, **options: Any) -> Path:
        build = self.place.compile(dict(settings, name=name), f"{name}.dsc")
        run = self.place.folder / f"run-{name}"
        train(build, run, self.corpus, steps, *wrong, **options)
        return run


@pytest.fixture(scope="module")
def runs(new_place: Callable[[], Place]) -> StragglerRuns:
    return StragglerRuns(new_place())


def check_event(event: dict[str, Any], kind: str) -> None:
    assert not faults({"time": "", "event": kind, **event}, FORMS[f"event_{kind}"])


def test_a_slow_rank_is_named_within_twenty_steps(runs: StragglerRuns) -> None:
    run = runs.train(dict(TWO, more=WARN), "slow", slowed({SLOW: 1.3}, 2))
    (found,) = events(run, "straggler")
    check_event(found, "straggler")
    assert (found["rank"], found["part"], found["action"], found["kept_because"]) == (SLOW, "compute", "warn", "")
    assert found["step"] <= 20 and 1.15 < found["factor"] < 1.5
    assert found["reason"] in said(run) and f"rank {SLOW} on {found['host']} computes 1." in found["reason"]
    assert [row.get("straggler") for row in rows(run)] == [SLOW if n >= found["step"] else None for n in range(1, 23)]
    assert str(event_line({"event": "straggler", **found})).endswith(found["reason"])


def test_equal_ranks_are_not_reported(runs: StragglerRuns) -> None:
    run = runs.train(dict(TWO, more=WARN), "equal", slowed({}, 2))
    assert not events(run, "straggler") and not any("straggler" in row for row in rows(run))


def test_nothing_is_judged_if_the_spec_says_so(runs: StragglerRuns) -> None:
    run = runs.train(dict(TWO, more="health { straggler = none }"), "none", slowed({SLOW: 2.0}, 2))
    assert len(rows(run)) == STEPS and not events(run, "straggler")


@pytest.mark.parametrize(
    ("factor", "elastic", "reason"),
    [(3.0, False, "to leave it out, use --restarts N --elastic"), (1.6, True, "a step would take 2.00 times as long")],
)
def test_the_reason_why_a_device_stays_is_said(runs: StragglerRuns, factor: float, elastic: bool, reason: str) -> None:
    name = f"stays_{elastic}"
    run = runs.train(dict(TWO, more=EXCLUDE), name, slowed({SLOW: factor}, 2), restarts=2 * elastic, elastic=elastic)
    (found,) = events(run, "straggler")
    check_event(found, "straggler")
    assert found["action"] == "warn" and reason in found["kept_because"]
    assert f"; its device stays: {found['kept_because']}" in said(run)
    assert ("a slow rank is reported, and its device stays: to leave it out" in said(run)) is not elastic
    assert starts(run) == [2] and len(rows(run)) == STEPS


def test_the_run_goes_on_without_the_device_of_a_slow_rank(runs: StragglerRuns) -> None:
    """It is saved first, so no step is trained again, and the losses are those of a run without a fault."""
    options = {"restarts": 1, "elastic": True, "steps": 30}
    run = runs.train(dict(TWO, more=EXCLUDE), "excluded", slowed({SLOW: 3.0}, 2), **options)
    (found,) = events(run, "straggler")
    assert found["action"] == "exclude" and found["rank"] == SLOW and not found["kept_because"]
    assert starts(run) == [2, 1]
    (restart,) = events(run, "restart")
    assert restart["saved_step"] == found["step"] and f"rank {SLOW} on " in restart["reason"]
    assert f"going on without the device of rank {SLOW}\n" in said(run) and "error:" not in said(run)
    straight = runs.train(dict(TWO, more=EXCLUDE), "straight", steps=30)
    assert [row["step"] for row in rows(run)] == [*range(1, 31)]
    assert [row["loss"] for row in rows(run)] == pytest.approx([row["loss"] for row in rows(straight)], rel=1e-4)
    assert saved(run).meta["position"] == saved(straight).meta["position"], "no sample twice"


def test_a_device_stays_if_no_smaller_plan_is_faster(runs: StragglerRuns) -> None:
    """Two of four devices would be left, and the run would be slower. It goes on with all four from the saved step."""
    settings = dict(TWO, devices=4, more=EXCLUDE)
    options = {"restarts": 1, "elastic": True, "steps": 30}
    run = runs.train(settings, "four", slowed({2: 1.6}, 4), **options)
    assert "going on with the device of rank 2: 2 devices without it are slower" in said(run)
    first, *later = events(run, "straggler")
    assert first["action"] == "exclude" and starts(run) == [4, 4]
    assert all(event["kept_because"] == "the run would not be faster without it" for event in later)
    assert [row["step"] for row in rows(run)] == [*range(1, 31)]
    (restart,) = events(run, "restart")
    assert restart["saved_step"] == first["step"]


def test_a_run_goes_on_if_its_state_cannot_be_saved(runs: StragglerRuns) -> None:
    """Training with a slow rank is better than no training."""

    def full_disk(trainer: Trainer) -> None:
        def save(*_: object) -> dict[str, object]:
            raise CheckpointError("No space left on device")

        Publisher.save = save  # type: ignore[assignment, method-assign]  # in the process of the rank

    faults = (slowed({SLOW: 3.0}, 2), full_disk)
    run = runs.train(dict(TWO, more=EXCLUDE), "full", *faults, restarts=1, elastic=True, code=1)
    assert "its device stays: the state was not saved" in said(run)
    assert len(rows(run)) == STEPS and events(run, "restart")[0]["step"] == STEPS, "the last save fails, too"
