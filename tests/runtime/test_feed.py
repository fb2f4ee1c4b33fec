"""A thread reads samples during the previous step, each once."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.load import load
from runtime.build.build import Build
from runtime.launch.heartbeat import Board
from runtime.step.micro_batches import Feed, MicroBatches
from runtime.step.trainer import Trainer
from tests.runtime.step.samples import RandomSamples

TINY = Path(__file__).parents[2] / "specs" / "tiny.dsc"
VALIDATED = ["train.validate.every=2", "train.validate.batches=1", "data.validation=5%"]
STEPS = 4


class Watched(RandomSamples):
    """Samples, with a record of those read by the training thread."""

    def __init__(self, vocab: int, sequence: int) -> None:
        super().__init__(vocab, sequence)
        self.trains = threading.get_ident()
        self.read_by_trainer: set[int] = set()

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        if threading.get_ident() == self.trains:
            self.read_by_trainer.add(index)
        return super().tokens(index)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> Build:
    folder = tmp_path_factory.mktemp("build") / "tiny"
    write_build(folder, compile_spec(load(TINY, overrides=VALIDATED), segments=segments).files)
    return Build.open(folder)


def trainer_of(build: Build) -> tuple[Trainer, Watched]:
    samples = Watched(build.plan.model.vocab, build.plan.train.sequence)
    return Trainer(build, 0, samples, samples, Board(1).bind(0)), samples


def test_only_the_first_step_waits(build: Build) -> None:
    """Samples of later steps are read by another thread, once each; a validation between steps takes none of them."""
    trainer, samples = trainer_of(build)
    for step in range(STEPS):
        trainer.train_step()
        assert trainer.feed._prefetched is not None
        trainer.feed._prefetched.future.result()  # a step that takes as long as its samples take
        if step == 1:
            trainer.losses_on(RandomSamples(samples.vocab, samples.sequence), 1)
    batch = build.plan.batches[0][1]
    assert trainer.feed.waits == 1
    assert samples.read_by_trainer == set(range(batch))
    assert Counter(samples.read) == Counter(range((STEPS + 1) * batch))


def test_reading_ahead_gives_the_same_samples(build: Build) -> None:
    """A position set between steps takes effect, and losses equal those of samples read without a thread."""
    ahead, _ = trainer_of(build)
    late, _ = trainer_of(build)
    for step in range(STEPS):
        if step == 2:
            for trainer in (ahead, late):
                trainer.position = trainer.position.skipping([(trainer.position.next, trainer.position.next + 3)])
        late.feed._prefetched = None
        assert ahead.train_step()["loss"] == late.train_step()["loss"]
    assert late.feed.waits == STEPS and ahead.feed.waits >= 2


def test_an_error_of_a_source_is_raised_by_the_step_that_reads_it() -> None:
    def broken() -> MicroBatches:
        raise OSError("the disk is gone")

    feed, drawn = Feed(), np.arange(2)
    feed.read_ahead(drawn, broken)
    with pytest.raises(OSError, match="the disk is gone"):
        feed.take(drawn, broken)


def test_samples_are_read_on_request_and_once(build: Build) -> None:
    samples = RandomSamples(build.plan.model.vocab, build.plan.train.sequence)
    batch = build.plan.batches[0][1]
    micro_batches = MicroBatches(build.plan, samples, np.arange(batch), samples.sequence, 0, torch.device("cpu"))
    assert not micro_batches and samples.read == []
    size = build.plan.train.micro_batch
    assert (
        micro_batches["targets"].shape == micro_batches["mtp_tokens"].shape == (batch // size, size * samples.sequence)
    )
    assert samples.read == list(range(batch)), "once for all names"
