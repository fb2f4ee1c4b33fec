"""A run on three sources whose weights change in its second phase: kills leave no trace, and weights may change.

One source is a file of token ids in Megatron's format; the others use fill-in-the-middle.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.load import load
from dsl.resolve.chosen import phases_in
from runtime.data import tokenizer
from runtime.data.infill import OF_TRAINED
from runtime.data.token_files import open_split
from tests.runtime.data import megatron
from tests.runtime.processes import wait_for
from tests.runtime.run.place import ONE_RANK, Place, bits, rows, saved, untimed

BLEND = """
import "tiny.dsc"
run blend extends tiny {
  train { validate { every = 6, batches = 1 }, checkpoint { every = 3 } }
  data {
    sources {
      web  { files = "web/*.txt", weight = 0.5 }
      code { files = "code/*.txt", weight = 0.3, fim = 0.5 }
      ids  { files = "ids_text_document", weight = 0.2 }
    }
    tokenizer  = "tokenizer.json"
    validation = 20%
    fim        = 0.1
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
    texts = [path.read_text() for path in sorted(place.folder.glob("*/*.txt"))]
    bpe = tokenizer.train(texts, 300, OF_TRAINED)
    (place.folder / "tokenizer.json").write_text(tokenizer.to_json(bpe))
    megatron.write(place.folder / "ids_text_document", [[[*ids, 0]] for ids in tokenizer.encode(bpe, texts)], "uint16")
    path = place.folder / "blend.dsc"
    path.write_text(BLEND)
    for name in phases_in(path):
        write_build(place.folder / "build" / name, compile_spec(load(path, name), segments=place.segments).files)
    return place


@pytest.fixture(scope="module")
def straight(place: Place) -> Path:
    place.dsc("train", "blend.dsc", "--out", "straight")
    return place.folder / "straight"


def test_samples_are_drawn_from_sources_by_weight(straight: Path) -> None:
    """Within one sample after every step, in both phases; the validation loss is the weighted mean over sources."""
    metrics = rows(straight)
    order = saved(straight).meta["position"]["order"]
    windows = {share["name"]: share["order"]["windows"] for share in order["shares"]}
    counts = [{name: round(epochs * windows[name]) for name, epochs in row["epochs"].items()} for row in metrics]
    assert [sum(count.values()) for count in counts] == [4 * row["step"] for row in metrics]
    for step, count in enumerate(counts, 1):
        begin = counts[5]["web"] if step > 6 else 0
        weight, samples = (1 / 6, 4 * (step - 6)) if step > 6 else (0.5, 4 * step)
        assert abs(count["web"] - begin - weight * samples) < 1
    last = metrics[-1]
    mean = math.fsum(last[f"validation_loss_{name}"] * w for name, w in (("web", 1), ("code", 3), ("ids", 2))) / 6
    assert last["validation_loss"] == pytest.approx(mean)


def test_a_kill_draws_the_same_samples(place: Place, straight: Path) -> None:
    """After SIGKILL in the first phase and in the second, weights and rows equal those of the uninterrupted run."""
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


def test_training_data_is_arranged(place: Place, straight: Path) -> None:
    """The run's data has no copy of the file of token ids, and `dsc data show` shows the tokens between parts."""
    (meta,) = (straight / "data").glob("*/meta.json")
    assert not list(meta.parent.glob("ids.*"))
    code, begin = open_split(meta.parent, "train", "code"), 1  # the id after the end token's
    (first, *_) = np.flatnonzero(code.tokens(0, code.num_tokens) == begin)
    output = place.dsc("data", "show", "blend.dsc", "--of", "code", "--row", first // 16).stdout
    assert "<|fim_begin|>" in output
    shutil.copytree(straight, place.folder / "other")
    changed = place.dsc("train", "blend.dsc", "--out", "other", "--resume", "-s", "data.fim=0.2", "--steps", 13)
    assert "other text" in changed.stdout + changed.stderr


def _newest(run: Path) -> int:
    """The step of the newest checkpoint; 0 before the first."""
    latest = run / "checkpoints" / "LATEST"
    return int(latest.read_text("utf-8").strip().removeprefix("step-")) if latest.exists() else 0
