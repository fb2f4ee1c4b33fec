"""All contestants do the same work: their training steps are ours, from the same weights on the same samples."""

from __future__ import annotations

import itertools
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.speed import theirs
from benchmarks.speed.pipelining import OF_TWO, ONE_EACH, Part
from benchmarks.speed.theirs_model import Batches, Choice, model_of
from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.load import resolve
from runtime.build.build import Build
from runtime.launch.heartbeat import Board
from runtime.step.trainer import Trainer

SPEC = Path(__file__).parents[2] / "specs" / "bench-4.dsc"
STEPS, SEQUENCE, VOCAB = 4, 16, 320
SMALL = ("parallel.data=1", "cluster.node.devices=1", "model.vocab=320", "data.tokenizer=train(320)", "model.hidden=32")
CASES = {
    "sdpa": ("fp32", Choice(), 1e-5),
    "eager, two parts, foreach": ("fp32", Choice("eager", 2, "foreach"), 1e-5),
    "autocast": ("autocast", Choice(), 0.08),
    "bf16 weights": ("bf16", Choice("eager"), 0.08),
    "plain, sdpa": ("fp32", Choice(), 1e-5),
    "plain, eager, two parts": ("fp32", Choice("eager", 2), 1e-5),
    "plain, autocast": ("autocast", Choice(), 0.08),
}


class Random:
    """Samples that need no corpus: of few tokens, which is soon learnt."""

    sequence = SEQUENCE

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng(index).integers(0, VOCAB // 16, SEQUENCE + 2)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("build") / "build"
    sizes = (f"train.sequence={SEQUENCE}", "train.rate=constant at 1e-2")
    write_build(folder, compile_spec(resolve(SPEC, overrides=(*SMALL, *sizes)).spec).files)
    return Build.open(folder)


@pytest.fixture(scope="module")
def our_losses(build: Build) -> list[float]:
    trainer = Trainer(build, 0, Random(), None, Board(1).bind(0))
    trainer.layers = tuple(replace(layer, bias_rate=None) for layer in trainer.layers)  # theirs does not balance
    return [trainer.train_step()["loss"] for _ in range(STEPS)]


@pytest.mark.parametrize("case", CASES)
def test_torch_and_dsc_take_equal_steps(
    case: str, build: Build, our_losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss after loss, so that clipping, decay, the rate and the order of samples agree, too."""
    precision, choice, tolerance = CASES[case]
    monkeypatch.setattr(theirs, "batches_of", lambda plan, _: Batches(Random(), plan.train.batch.end))  # type: ignore[arg-type]
    experts = "plain" if case.startswith("plain") else "grouped_mm"
    args = Namespace(build=build.folder, corpus=None, experts=experts, precision=precision, ranks=1, compile=False)
    step = theirs.step_of(args, choice)
    losses = [step() for _ in range(STEPS)]
    assert max(abs(a - b) for a, b in zip(losses, our_losses, strict=True)) < tolerance, (losses, our_losses)
    assert our_losses[0] - our_losses[-1] > 5 * tolerance, "a model that learnt nothing would agree with anything"


@pytest.mark.parametrize("firsts", [OF_TWO, ONE_EACH], ids=["of two", "one each"])
def test_pipeline_parts_in_sequence_equal_the_model(firsts: tuple[int, ...], build: Build) -> None:
    model = model_of(build.plan, "grouped_mm", "eager")
    layers = len(model.model.layers)
    bounds = sorted({min(first, layers) for first in firsts} | {layers})
    tokens = torch.from_numpy(np.stack([Random().tokens(i)[:SEQUENCE] for i in range(2)]))
    with torch.no_grad():
        x = tokens
        for first, last in itertools.pairwise(bounds):
            x = Part(model, first, last)(x)
        assert torch.allclose(x, model(input_ids=tokens, use_cache=False).logits, atol=1e-6)
