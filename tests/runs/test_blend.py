"""A run of two sources whose weights change in its second phase: a kill leaves no trace, and other weights go on."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from compiler.build import compile_spec, write_build
from dsl.chosen import phases_in
from dsl.load import load
from tests.runs.place import ONE_RANK, Place, bits, rows, saved, untimed
from tests.runtime.processes import wait_for

BLEND = """
import "tiny.dsc"
run blend extends tiny {
  train { validate { every = 6, batches = 1 }, checkpoint { every = 3 } }
  data {
    sources {
      web  { files = "web/*.txt", weight = 0.7 }
      code { files = "code/*.txt", weight = 0.3 }
    }
    tokenizer  = train(300)
    validation = 20%
  }
  phase end { data { sources { web { weight = 0.1 } } }, train { steps = 6 } }
}
"""
WORDS = ("the cat sat on a mat and ran far away from all dogs", "def x ( ) : return y + z if not None else import")


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    place = new_place()
    place.write(dict(ONE_RANK, batch=4, steps=6))
    drawn = random.Random(1)
    for name, words in zip(("web", "code"), WORDS, strict=True):
        (place.folder / name).mkdir()
        for number in range(12):
            text = " ".join(drawn.choice(words.split()) for _ in range(300))
            (place.folder / name / f"{number}.txt").write_text(text)
    path = place.folder / "blend.dsc"
    path.write_text(BLEND)
    for name in phases_in(path):
        write_build(place.folder / "build" / name, compile_spec(load(path, name), segments=place.segments).files)
    return place


@pytest.fixture(scope="module")
def straight(place: Place) -> Path:
    place.dsc("train", "blend.dsc", "--out", "straight")
    return place.folder / "straight"


def test_samples_are_of_each_source_by_its_weight(straight: Path) -> None:
    """Within one sample after every step, in both phases; and the loss on held-out text is the mean by weights."""
    found = rows(straight)
    order = saved(straight).meta["position"]["order"]
    windows = {share["name"]: share["order"]["windows"] for share in order["shares"]}
    counts = [{name: round(epochs * windows[name]) for name, epochs in row["epochs"].items()} for row in found]
    assert [sum(count.values()) for count in counts] == [4 * row["step"] for row in found]
    for step, count in enumerate(counts, 1):
        begin = counts[5]["web"] if step > 6 else 0
        weight, samples = (1 / 4, 4 * (step - 6)) if step > 6 else (0.7, 4 * step)
        assert abs(count["web"] - begin - weight * samples) < 1
    last = found[-1]
    mean = (last["validation_loss_web"] + 3 * last["validation_loss_code"]) / 4
    assert last["validation_loss"] == pytest.approx(mean)


def test_a_kill_draws_the_same_samples(place: Place, straight: Path) -> None:
    """SIGKILL in the first phase and in the second; weights and rows are those of the run without a break."""
    run, words = place.folder / "killed", ("train", "blend.dsc", "--out", "killed", "--resume")
    for step in (3, 9):
        with place.started(*words) as running:
            wait_for(lambda step=step: _newest(run) >= step, f"the checkpoint of step {step}")
            for pid in running.seen():
                os.kill(pid, signal.SIGKILL)
            running.ends()
    place.dsc(*words)
    ours, theirs = saved(run), saved(straight)
    assert bits(ours) == bits(theirs) and ours.meta["position"] == theirs.meta["position"]
    assert untimed(run) == untimed(straight)


def _newest(run: Path) -> int:
    """The step of the newest checkpoint; 0 before the first."""
    latest = run / "checkpoints" / "LATEST"
    return int(latest.read_text("utf-8").strip().removeprefix("step-")) if latest.exists() else 0
