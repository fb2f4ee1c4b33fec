"""A run resumed with another batch or sequence: it draws the samples that come next, and token counts continue."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.load import load
from runtime.build.build import Build
from runtime.contract.rate import learning_rate
from runtime.data.samples import Samples
from runtime.launch.heartbeat import Board
from runtime.run.loop import Loop
from runtime.run.resume import find
from runtime.step.start import Start
from runtime.step.trainer import Trainer
from tests.runtime.run.place import ONE_RANK, Place, rows, saved

BATCH, SEQUENCE, FIRST, MORE = 8, 16, 5, 4
SETTINGS = dict(ONE_RANK, steps=40)


def with_keys(place: Place, settings: dict[str, Any], **values: str) -> Path:
    """The build of a spec with some lines replaced."""
    path = place.write(settings)
    text = path.read_text("utf-8")
    for old, new in values.items():
        assert text.count(KEYS[old]) == 1
        text = text.replace(KEYS[old], new)
    path.write_text(text, "utf-8")
    build = place.folder / "build" / "tiny"
    write_build(build, compile_spec(load(path), segments=place.segments).files)
    return build


KEYS = {"sequence": "sequence = 16,", "batch": "batch = 8,", "steps": "steps = 40", "rate": "warmup 2 steps to 2e-3"}


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    return new_place()


def go_on(place: Place, name: str, monkeypatch: pytest.MonkeyPatch, **values: str) -> tuple[Path, list[int], str]:
    """Resume the run `name` for some steps with other keys. Returns its folder, the drawn samples, and messages."""
    run = place.folder / name
    if not run.exists():
        place.dsc("train", "tiny.dsc", "--out", name, "--steps", FIRST)
    build = Build.open(with_keys(place, SETTINGS, rate="warmup 2000 tokens to 2e-3", **values))
    (corpus,) = (path.parent for path in (run / "data").glob("*/meta.json"))
    resumption = find(run / "checkpoints", build, corpus, "cpu")
    drawn: list[int] = []
    real = Trainer.accumulate

    def accumulate(self: Trainer) -> dict[str, Tensor]:
        sums = real(self)
        drawn.extend(self.batch.samples.tolist())
        return sums

    monkeypatch.setattr(Trainer, "accumulate", accumulate)
    loop = Loop(
        build, run, corpus, resumption.checkpoint.step + MORE, Start(resumption.position, saved=resumption.checkpoint)
    )
    loop.rank(0, 1, Board(1).bind(0))
    monkeypatch.undo()
    return run, drawn, "\n".join(resumption.notes)


@pytest.mark.parametrize("size", [16, 4])
def test_another_batch_draws_the_samples_that_follow(place: Place, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    with_keys(place, SETTINGS, rate="warmup 2000 tokens to 2e-3")
    run, drawn, notes = go_on(place, f"batch {size}", monkeypatch, batch=f"batch = {size},")
    done = FIRST * BATCH
    assert drawn == [*range(done, done + MORE * size)], "none is skipped, none is drawn again"
    tokens = [row["tokens"] for row in rows(run)]
    steps = [BATCH] * FIRST + [size] * MORE
    assert tokens == np.cumsum(np.array(steps) * SEQUENCE).tolist(), "tokens go on without a jump"
    phases = Build.open(place.folder / "build" / "tiny").plan.train.rate
    assert [row["rate"] for row in rows(run)] == [learning_rate(phases, n) for n in tokens], "the rate goes by tokens"
    assert rows(run)[-1]["rate"] < 2e-3, "the warm-up goes on, so that it shows by what it goes"
    assert f"40 samples (640 tokens) were trained on; step 6 takes {size} of samples 40 to {39 + size}, which" in notes
    total = 40 * size * SEQUENCE
    end = FIRST + -(-(total - 640) // (size * SEQUENCE))
    assert f"the run ends at {total:,} tokens, after step {end}" in notes
    position = saved(run).meta["position"]
    assert (position["samples"], position["tokens"], position["next"]) == (
        done + MORE * size,
        tokens[-1],
        drawn[-1] + 1,
    )
    assert f"train.batch.end 8 → {size}" in notes


def test_a_jump_of_the_rate_is_reported(place: Place) -> None:
    """Both rates are named; there is no message if phases only differ after this position."""
    with_keys(place, SETTINGS, rate="warmup 2000 tokens to 2e-3")
    place.dsc("train", "tiny.dsc", "--out", "jump", "--steps", FIRST)
    (corpus,) = (path.parent for path in (place.folder / "jump" / "data").glob("*/meta.json"))
    notes = {
        name: find(place.folder / "jump" / "checkpoints", Build.open(build()), corpus, "cpu").notes
        for name, build in {
            "longer warm-up": lambda: with_keys(place, SETTINGS, rate="warmup 4000 tokens to 2e-3"),
            "more steps": lambda: with_keys(place, SETTINGS, rate="warmup 2000 tokens to 2e-3", steps="steps = 80"),
        }.items()
    }
    jump = "the learning rate of the next step is 0.000384, and was 0.000768 in the previous plan: "
    assert any(note.startswith(jump) for note in notes["longer warm-up"])
    assert not any("learning rate" in note for note in notes["more steps"])


@pytest.mark.parametrize("sequence", [8, 32])
def test_another_sequence_trains_on_the_rest_of_the_epoch(
    place: Place, monkeypatch: pytest.MonkeyPatch, sequence: int
) -> None:
    """Windows of 8 tokens: no seen window is repeated. Windows of 32: only those of which at most half was seen."""
    with_keys(place, SETTINGS, rate="warmup 2000 tokens to 2e-3")
    run, drawn, notes = go_on(place, f"sequence {sequence}", monkeypatch, sequence=f"sequence = {sequence},")
    assert len(drawn) == MORE * BATCH == len({*drawn})
    tokens = [row["tokens"] for row in rows(run)]
    assert np.diff(tokens).tolist() == [BATCH * SEQUENCE] * (FIRST - 1) + [BATCH * sequence] * MORE
    (corpus,) = (path.parent for path in (run / "data").glob("*/meta.json"))
    before, after = (Samples(corpus, "train", n, seed=1) for n in (SEQUENCE, sequence))
    is_read = np.zeros(before.reader.num_tokens, dtype=bool)
    for index in range(FIRST * BATCH):
        is_read[before.window(index) * SEQUENCE :][:SEQUENCE] = True
    shares = [is_read[after.window(i) * sequence :][:sequence].mean() for i in range(drawn[-1] + 1)]
    assert drawn == [i for i, share in enumerate(shares) if share <= 0.5]
    assert f"windows of 16 tokens are cut again into {sequence}: of the rest of epoch 1 " in notes
    assert ("0 tokens are skipped and 0 repeated; its order changes" in notes) == (sequence == 8)


def test_a_run_with_a_token_budget_ends_by_tokens(place: Place) -> None:
    """5,120 tokens: five steps of 128 cover 640; 18 more of 256 reach the end. Resuming twice gives the same."""
    with_keys(place, SETTINGS)
    for name in ("once", "twice"):
        place.dsc("train", "tiny.dsc", "--out", name, "--steps", FIRST)
    with_keys(place, SETTINGS, batch="batch = 16,", steps="tokens = 5120")
    done = place.dsc("train", "tiny.dsc", "--out", "once", "--resume")
    assert "the run ends at 5,120 tokens, after step 23\n" in done.stdout
    assert [row["tokens"] for row in rows(place.folder / "once")][-2:] == [4992, 5248]
    assert rows(place.folder / "once")[-1]["step"] == 23
    place.dsc("train", "tiny.dsc", "--out", "twice", "--resume", "--steps", 11)
    place.dsc("train", "tiny.dsc", "--out", "twice", "--resume")
    losses = [[row["loss"] for row in rows(place.folder / name)] for name in ("once", "twice")]
    assert losses[0] == losses[1]
    again = place.dsc("train", "tiny.dsc", "--out", "once", "--resume")
    assert "nothing to do: step 23 of 23 is reached" in again.stdout


def test_a_ramp_resumes_by_trained_tokens(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps of 8 are 640 tokens, however the new spec counts steps; the next batch has the size for 640 tokens."""
    with_keys(place, SETTINGS, rate="warmup 2000 tokens to 2e-3")
    grow = "batch { from = 6, to = 10, over = 1400 tokens },"
    _, drawn, notes = go_on(place, "grown", monkeypatch, batch=grow)
    plan = Build.open(place.folder / "build" / "tiny").plan
    reached = {6: 0}  # sequences of a step → tokens trained on before
    for (first, size), (end, following) in pairwise(plan.batches):
        reached[following] = reached[size] + (end - first) * size * SEQUENCE
    sizes: list[int] = []
    tokens = FIRST * BATCH * SEQUENCE
    while len(sizes) < MORE:
        sizes.append(max(size for size, token in reached.items() if token <= tokens))
        tokens += sizes[-1] * SEQUENCE
    assert len(reached) > 2 and len({*sizes}) > 1, "the batch grows in these steps"
    assert drawn == [*range(FIRST * BATCH, FIRST * BATCH + sum(sizes))]
    assert f"step 6 takes {sizes[0]} of samples 40 to" in notes
