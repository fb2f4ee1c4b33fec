"""The message on a non-finite loss names its batch; `--resume --skip-batch` skips exactly these samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from runtime.build.build import Build
from runtime.data.position import Position
from runtime.launch.heartbeat import Board
from runtime.observe.health import record
from runtime.observe.health.judge import BadStepError, Verdict
from runtime.run.loop import Loop
from runtime.run.resume import find, skip_bad_batches
from runtime.run.starting_position import order_of
from runtime.step.start import Start
from runtime.step.trainer import Trainer
from tests.runtime.run.place import FOUR_RANKS, ONE_RANK, Place, bits, saved, untimed

BATCH, STEPS = 8, 9
BAD = {32, 45}  # samples of steps 5 and 6


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """With `data`, a run of one step, for its prepared data."""
    place = new_place()
    place.compile(ONE_RANK)
    place.dsc("train", "tiny.dsc", "--out", "data", "--steps", 1)
    return place


def life(
    place: Place, run: Path, monkeypatch: pytest.MonkeyPatch, steps: int, *, skip: bool, bad: bool = True
) -> list[int]:
    """One process's part of a run. Returns the drawn samples. The loss is NaN if one of BAD is among them."""
    build = Build.open(place.folder / "build" / "tiny")
    (corpus,) = (path.parent for path in (place.folder / "data" / "data").glob("*/meta.json"))
    checkpoint, position = None, Position(order=order_of(build, corpus))
    if (run / "checkpoints").exists():
        resumption = find(run / "checkpoints", build, corpus, "cpu")
        checkpoint, position = resumption.checkpoint, resumption.position
    if skip:
        position, _ = skip_bad_batches(run, position, corpus)
    drawn: list[int] = []
    real_accumulate, real_losses = Trainer.accumulate, Trainer._losses

    def accumulate(self: Trainer) -> dict[str, Tensor]:
        drawn.extend(self._draw(self.position).tolist())
        return real_accumulate(self)

    def losses(self: Trainer, sums: dict[str, Tensor]) -> dict[str, float]:
        values = real_losses(self, sums)
        return values | {"loss": math.nan} if bad and BAD & {*drawn[-BATCH:]} else values

    monkeypatch.setattr(Trainer, "accumulate", accumulate)
    monkeypatch.setattr(Trainer, "_losses", losses)
    run.mkdir(exist_ok=True)
    try:
        Loop(build, run, corpus, steps, Start(position, saved=checkpoint)).rank(0, 1, Board(1).bind(0))
    finally:
        monkeypatch.undo()
    return drawn


def bad(step: int, samples: tuple[int, int]) -> BadStepError:
    return BadStepError(step, Verdict("stop", "loss nan"), math.nan, math.nan, samples)


def test_a_resume_skips_recorded_batches(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches after step 3 are bad. Both are met, recorded and skipped; the run then equals one on the other
    samples, and resuming from any of its checkpoints gives the same bits."""
    run = place.folder / "run"
    advice = "on samples {} to {}; nothing was updated; to leave these samples out: dsc train --resume --skip-batch"
    with pytest.raises(BadStepError, match=rf"step 5: loss nan, .* {advice.format(32, 39)}"):
        life(place, run, monkeypatch, STEPS, skip=False)
    assert saved(run).step == 3
    with pytest.raises(BadStepError, match=advice.format(32, 39)):
        life(place, run, monkeypatch, STEPS, skip=False)
    diverged = "on samples 40 to 47; nothing was updated; the same step failed on samples 32 to 39, too, so the weights"
    with pytest.raises(BadStepError, match=rf"step 5: .* {diverged}"):
        life(place, run, monkeypatch, STEPS, skip=True)
    health = json.loads((run / "health.json").read_text("utf-8"))
    met = [(row["step"], row["samples"], row["reason"].partition(",")[0]) for row in health["batches"]]
    assert met == [(5, [32, 39], "loss nan"), (5, [40, 47], "loss nan")] and health["rollbacks"] == []
    drawn = life(place, run, monkeypatch, STEPS, skip=True)
    assert drawn == [*range(24, 32), *range(48, 48 + 5 * BATCH)]
    assert [row["tokens"] for row in untimed(run)] == [16 * BATCH * n for n in range(1, STEPS + 1)]
    # From the checkpoint of step 4, resumed plainly after a process that had skipped them and saved step 5.
    rerun = place.folder / "other"
    for steps, skip in ((3, False), (4, False)):
        life(place, rerun, monkeypatch, steps, skip=skip)
    (rerun / "health.json").write_bytes((run / "health.json").read_bytes())
    assert life(place, rerun, monkeypatch, 5, skip=True) == [*range(48, 56)]
    (rerun / "health.json").unlink()
    assert life(place, rerun, monkeypatch, STEPS, skip=False) == [*range(56, 56 + 4 * BATCH)]
    assert bits(saved(rerun)) == bits(saved(run))
    assert [row["loss"] for row in untimed(rerun)] == [row["loss"] for row in untimed(run)]


def test_samples_to_skip_are_in_the_checkpoint(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint saved between the resume and the bad batch records it: later resumes skip it without the option."""
    run = place.folder / "remembered"
    life(place, run, monkeypatch, 2, skip=False)
    (corpus,) = (path.parent for path in (place.folder / "data" / "data").glob("*/meta.json"))
    position = Position(order=order_of(Build.open(place.folder / "build" / "tiny"), corpus))
    data = json.loads((corpus / "meta.json").read_text("utf-8"))["sha256"]
    for samples in ((32, 40), (40, 48)):
        record.record(run, record.identity(position, data), bad(5, samples))
    life(place, run, monkeypatch, 3, skip=True)
    assert saved(run).meta["position"]["skip"] == [[32, 48]]
    (run / "health.json").unlink()
    assert life(place, run, monkeypatch, 5, skip=False) == [*range(24, 32), *range(48, 56)]
    assert saved(run).meta["position"]["skip"] == []


def test_records_of_another_text_or_damaged_ones_skip_nothing(place: Place) -> None:
    run = place.folder / "foreign"
    run.mkdir()
    (corpus,) = (path.parent for path in (place.folder / "data" / "data").glob("*/meta.json"))
    position = Position(order=order_of(Build.open(place.folder / "build" / "tiny"), corpus))
    order = record.identity(position, "0" * 64)
    record.record(run, order, bad(5, (32, 40)))
    assert record.read(run, order) == ((32, 40),)
    unchanged, note = skip_bad_batches(run, position, corpus)
    assert unchanged == position and note.startswith(f"no batch to skip: {run}/health.json has none")
    for text in ("", "[]", "{", '{"order": 1, "batches": 1}', "[" * 100_000, '{"order": 0}'):
        (run / "health.json").write_text(text, "utf-8")
        assert record.read(run, order) == ()


def test_the_suggested_command_resumes(place: Place) -> None:
    """Four real ranks whose weights overflow: the batch is reported, recorded, and skipped on request."""
    place.compile(dict(FOUR_RANKS, name="absurd", rate=10, decay=10), "absurd.dsc")
    run = place.folder / "absurd"
    command = ("train", "absurd.dsc", "--out", run, "--steps", 10**6)
    failed = place.dsc(*command, code=1)
    (met,) = json.loads((run / "health.json").read_text("utf-8"))["batches"]
    first, last = met["samples"]
    assert (first, last) == ((met["step"] - 1) * BATCH, met["step"] * BATCH - 1)
    assert f"on samples {first} to {last}; nothing was updated; to leave these" in failed.stderr
    again = place.dsc(*command, "--resume", "--skip-batch", code=1)
    assert f"samples {first} to {last} are left out\n" in again.stdout
    assert f"the same step failed on samples {first} to {last}, too" in again.stderr and "--skip" not in again.stderr
    second = json.loads((run / "health.json").read_text("utf-8"))["batches"][1]["samples"]
    assert second[0] == last + 1, "the same weights meet the samples after those"
    alone = place.dsc("train", "absurd.dsc", "--out", "no", "--skip-batch", code=2)
    assert alone.stderr == "error: --skip-batch skips the bad batches of an earlier run: it needs --resume\n"
