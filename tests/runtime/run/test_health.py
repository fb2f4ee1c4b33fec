"""Wrong numbers: all ranks react alike, no sample is lost or trained twice, and the fault is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.build.build import Build
from runtime.data.position import Position
from runtime.observe.health.judge import BadStepError, Verdict
from runtime.observe.health.record import identity, record
from runtime.run.resume import text_of
from runtime.run.starting_position import order_of
from tests.compiler.cli.forms import FORMS, faults
from tests.runtime.run.place import DENSE, FOUR_RANKS, ONE_RANK, Place, bits, saved, untimed
from tests.runtime.run.sick import (
    Fault,
    behind_step,
    events,
    flip,
    killed_behind,
    loss_times,
    nan_weight,
    recorded,
    said,
    train,
)
from tests.runtime.run.test_fp8_resume import FEW_BITS

BATCH, STEPS = 8, 9
TWO = dict(FOUR_RANKS, pipeline=1, expert=1, schedule="1f1b", devices=2)
MESHES: dict[str, dict[str, Any]] = {
    "dp": dict(TWO, name="dp", model=DENSE),
    "pp": dict(TWO, name="pp", model=DENSE, pipeline=2),
    "ep": dict(TWO, name="ep", expert=2),
    "tp": dict(TWO, name="tp", model=DENSE, degrees=", tensor = 2"),
    "dualpipe": dict(FOUR_RANKS, name="dualpipe"),
    "bf16": dict(TWO, name="bf16", model=DENSE, precision="bf16", zero=1),
    "fp8": dict(TWO, name="fp8", model=FEW_BITS, precision="fp8_block", expert=2),
}
SKIP = "health { not_finite = skip, rerun = false }"
ALL = "health { not_finite = skip, spike { loss = 8, action = rollback }, back = 2, window = 6, hash = 2 }"
BACK = "health { not_finite = rollback, back = 2 steps }"


class Runs:
    """Runs in one place, all on the same text."""

    def __init__(self, place: Place) -> None:
        self.place = place
        place.compile(dict(ONE_RANK, name="text", model=DENSE))
        place.dsc("train", "tiny.dsc", "--out", "text", "--steps", 1)
        (self.corpus,) = (path.parent for path in (place.folder / "text" / "data").glob("*/meta.json"))

    def build(self, settings: dict[str, Any], health: str) -> Path:
        name = f"{settings['name']}_{len([*self.place.folder.glob('build/*')])}"
        return self.place.compile(dict(settings, name=name, more=health), f"{name}.dsc")

    def train(self, build: Path, name: str, *wrong: Fault, steps: int = STEPS, **options: Any) -> Path:
        run = self.place.folder / f"{build.name}-{name}"
        train(build, run, self.corpus, steps, *wrong, **options)
        return run

    def without(self, build: Path, *samples: tuple[int, int], steps: int = STEPS) -> Path:
        """An undisturbed run without these samples."""
        run = self.place.folder / f"{build.name}-without"
        run.mkdir()
        position = Position(order=order_of(Build.open(build), self.corpus))
        for span in samples:
            bad = BadStepError(1, Verdict("stop", "loss nan"), math.nan, math.nan, span)
            record(run, identity(position, text_of(self.corpus)), bad)
        train(build, run, self.corpus, steps, resume=True, skip_batch=True)
        return run


@pytest.fixture(scope="module")
def runs(new_place: Callable[[], Place]) -> Runs:
    return Runs(new_place())


def numbers(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "left_out"} for row in untimed(run)]


def check_equal(run: Path, other: Path) -> None:
    """Assert bit-identical rows, weights, moments, biases and position."""
    assert numbers(run) == numbers(other)
    assert bits(saved(run)) == bits(saved(other))
    assert saved(run).meta["position"] == saved(other).meta["position"]
    assert saved(run).meta["loads"] == saved(other).meta["loads"]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_batch_that_one_rank_makes_nan_is_skipped_by_all(runs: Runs, mesh: str) -> None:
    """Weights, moments, balancing biases, rate and all later steps equal those of a run without this batch."""
    build = runs.build(MESHES[mesh], SKIP)
    world = MESHES[mesh]["devices"]
    run = runs.train(build, "run", nan_weight(world - 1, {33}), steps=6)
    check_equal(run, runs.without(build, (32, 40), steps=6))
    assert [row.get("left_out", 0) for row in untimed(run)] == [0, 0, 0, 0, 1, 0]
    (met,) = events(run, "bad_step")
    assert not faults({"time": "", "event": "bad_step", **met}, FORMS["event_bad_step"])
    assert met["step"] == 5 and met["action"] == "skip" and met["samples"] == [32, 39]


@pytest.fixture(scope="module")
def spiky(runs: Runs) -> tuple[Path, Path]:
    """A build for two ranks, and its run on the samples that remain when step 8 rolls back two steps."""
    build = runs.build(dict(TWO, name="spiky", model=DENSE), ALL)
    return build, runs.without(build, (40, 64))


SPIKE = loss_times(100.0, {*range(56, 64)})


def test_a_spike_rolls_back(runs: Runs, spiky: tuple[Path, Path]) -> None:
    """Step 8 spikes: the run continues after step 5, which has no checkpoint, without the samples since then."""
    run = runs.train(spiky[0], "back", SPIKE)
    check_equal(run, spiky[1])
    (met,) = events(run, "bad_step")
    assert (met["step"], met["action"], met["to"], met["samples"]) == (8, "rollback", 5, [40, 63])
    assert "standard deviations above the mean of 6 steps" in met["reason"]
    assert "rolled back: step 8: loss " in said(run)
    assert saved(run).meta["health"]["rollbacks"] == 1 and saved(run).meta["health"]["acted"] == [8]


@pytest.mark.parametrize("step", [0, 5, 7])
def test_a_kill_within_a_rollback_changes_no_bit(runs: Runs, spiky: tuple[Path, Path], step: int) -> None:
    """A process is killed after the rollback is recorded (0), and after a step before and after the next checkpoint."""
    marker = runs.place.folder / f"killed-{step}"
    if step:
        run = runs.train(spiky[0], f"kill-{step}", SPIKE, killed_behind(step, marker), code=1)
    else:
        with pytest.MonkeyPatch.context() as patch:  # as under torchrun, where ranks are not restarted
            patch.setattr("runtime.run.starts.rollbacks", lambda run: ())
            run = runs.train(spiky[0], "kill-0", SPIKE, code=1)
    runs.train(spiky[0], f"kill-{step}", SPIKE, resume=True)
    check_equal(run, spiky[1])


def test_what_passes_is_told_from_what_is_real(runs: Runs) -> None:
    """NaN that does not recur when the step is repeated: the rank is named, and the run is bit-identical to another."""
    build = runs.build(dict(TWO, name="passing", model=DENSE), "health { not_finite = stop }")
    run = runs.train(build, "run", nan_weight(1, {33}, 1, runs.place.folder / "marker"), steps=6)
    check_equal(run, runs.without(build, steps=6))
    (fault,) = events(run, "fault")
    assert not faults({"time": "", "event": "fault", **fault}, FORMS["event_fault"])
    assert fault["ranks"] == [1] and fault["reason"].startswith("rank 1 had other losses or loads when")
    assert not events(run, "bad_step")
    real = runs.train(build, "real", nan_weight(1, {33}), steps=6, code=1)
    assert not events(real, "fault"), "it came again"
    assert [(event["step"], event["action"]) for event in events(real, "bad_step")] == [(5, "stop")]


def test_what_does_not_help_ends_the_run(runs: Runs) -> None:
    """All batches after step 4 are bad: two are skipped, then the run ends."""
    build = runs.build(dict(ONE_RANK, name="most", model=DENSE), SKIP.replace("skip,", "skip, most = 2,"))
    run = runs.train(build, "run", nan_weight(0, {*range(32, 99)}), code=1)
    assert [event["action"] for event in events(run, "bad_step")] == ["skip", "skip", "stop"]
    assert "2 skips or rollbacks in 128 steps were not enough" in said(run)
    assert saved(run).step == 3 and len(untimed(run)) == 4


def test_a_skip_takes_no_collective(runs: Runs) -> None:
    """A skipped step has the same sums as a trained one, except the all-gather of weights after it."""
    build = runs.build(dict(TWO, name="counted", model=DENSE, zero=1), SKIP)
    log = runs.place.folder / "asked"
    runs.train(build, "run", nan_weight(1, {33}), recorded(log), steps=6)
    good, *later = step_sums = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert len(step_sums) == 7 and step_sums[4] == [entry for entry in good if entry[0] != "gather"]
    assert all(sums == good for step, sums in enumerate(later, 1) if step != 4)


@pytest.mark.parametrize("mesh", ["dp", "dualpipe"])
def test_a_flipped_bit_is_found_within_an_interval(runs: Runs, mesh: str) -> None:
    """The tensor is named, and the rank, or both ranks if there are two replicas. No checkpoint has the bit: a resumed
    run is bit-identical to an undisturbed one."""
    build = runs.build(MESHES[mesh], "health { hash = 2 }")

    def flipped(trainer: Any) -> None:
        bucket = next(bucket for bucket in trainer.state.buckets if len(bucket.holders) > 1)
        entry = bucket.entries[-1]
        (runs.place.folder / "flipped").write_text(json.dumps([entry.name, bucket.holders]), "utf-8")
        flip(bucket.parameters, entry.end - 1, 3)

    run = runs.train(build, "run", behind_step(5, 1, flipped), code=1)
    name, holders = json.loads((runs.place.folder / "flipped").read_text("utf-8"))
    (fault,) = events(run, "fault")
    assert fault["step"] == 6 and fault["ranks"] == ([1] if len(holders) > 2 else holders)
    culprits = "rank 1 has other" if len(holders) > 2 else "ranks 0 and 1 have different"
    assert f"{culprits} bits of {name} (weights)" in fault["reason"]
    assert saved(run).step == 3
    runs.train(build, "run", resume=True)
    check_equal(run, runs.without(build))


def test_restarts_heal_a_flipped_bit(runs: Runs) -> None:
    build = runs.build(MESHES["dp"], "health { hash = 2 }")
    marker = runs.place.folder / "healed"

    def once(trainer: Any) -> None:
        if not marker.exists():
            marker.touch()
            flip(trainer.state.buckets[0].parameters, 0, 30)

    run = runs.train(build, "run", behind_step(4, 0, once), restarts=1)
    assert len(events(run, "fault")) == len(events(run, "restart")) == 1
    check_equal(run, runs.without(build))
