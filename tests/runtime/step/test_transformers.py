"""Logits after training with dsc, against `transformers` with the same weights, in float32."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.schema import BUILT_IN
from runtime.build.build import Build
from runtime.launch.heartbeat import Board
from runtime.step.trainer import Trainer
from tests.reference.config import Config
from tests.reference.huggingface import transformers_logits
from tests.runtime.step.samples import RandomSamples, weight
from tests.runtime.step.specs import MICRO_BATCH, MODELS, SEQUENCE, spec

STEPS, MICRO_BATCHES = 3, 4
TOLERANCE = 1e-5  # of the largest logit where that is above 1
DIFFERENT = 100 * TOLERANCE


@dataclass(frozen=True)
class Trained:
    """The results of a training step's forward, and its weights."""

    config: Config
    logical: dict[str, Tensor]
    tokens_BS: Tensor
    mtp_tokens_BS: Tensor | None  # None: without MTP, or of a family that has none there
    logits_BSV: Tensor
    mtp_logits_BSV: Tensor | None

    def differences(self, logical: dict[str, Tensor]) -> tuple[float, float]:
        """max |Δlogit| of the main model and of MTP against `transformers` with the weights `logical`."""
        main_BSV, mtp_BSV = transformers_logits(logical, self.config, self.tokens_BS, self.mtp_tokens_BS)
        main = difference(self.logits_BSV, main_BSV)
        if mtp_BSV is None or self.mtp_logits_BSV is None:
            return main, 0.0
        return main, difference(self.mtp_logits_BSV, mtp_BSV)


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.dtype == theirs.dtype == torch.float32 and ours.shape == theirs.shape
    return (ours - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())


# These have options of many families at once, or layers that differ: tests/compiler/tools/importers, tests/reference
# and tests/compiler/tools/weights compare family by family.
MIXED = ("pattern", "plain", "everything", "split", "latent", "post", "together", "tables", "v4", "hybrid", "v32")
PUBLISHED = [name for name in MODELS if name not in MIXED and not name.endswith("_streams")]


@pytest.fixture(scope="module", params=PUBLISHED)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder: Path = tmp_path_factory.mktemp("build") / "build"
    chosen = spec(1, 1, 1, MICRO_BATCHES, STEPS + 1, of=request.param)
    chosen = chosen.model_copy(update={"precision": BUILT_IN["fp32"]})
    with_mtp = request.param == "v3"
    write_build(folder, compile_spec(chosen).files)
    samples = RandomSamples(chosen.model.vocab, SEQUENCE)
    trainer = Trainer(Build.open(folder), 0, samples, samples, Board(1).bind(0))
    for bucket, entry, _ in trainer.state.logical(lambda bucket: bucket.parameters):
        bucket.set_weight(entry, torch.from_numpy(weight(entry.name, entry.shape)))
    for name, bias in trainer.state.biases.items():
        bias.copy_(torch.from_numpy(weight(name, tuple(bias.shape))))
    before = weights(trainer)
    for _ in range(STEPS):
        trainer.train_step()
    after = weights(trainer)
    assert all(not torch.equal(before[name], after[name]) for name in after), "every tensor was trained"
    logits: list[tuple[Tensor, Tensor | None]] = []
    trainer.bodies = trainer.bodies | {"F0": watched(trainer.bodies["F0"], logits)}
    trainer.accumulate()
    assert len(logits) == MICRO_BATCHES
    shape = (MICRO_BATCHES * MICRO_BATCH, SEQUENCE)
    return Trained(
        config=Config.from_plan(chosen.model.model_dump(mode="json") | {"sequence": SEQUENCE}),
        logical=after,
        tokens_BS=trainer.batch.data["tokens"].reshape(shape),
        mtp_tokens_BS=trainer.batch.data["mtp_tokens"].reshape(shape) if with_mtp else None,
        logits_BSV=torch.cat([main for main, _ in logits]).view(*shape, -1),
        mtp_logits_BSV=torch.cat([mtp for _, mtp in logits]).view(*shape, -1) if with_mtp else None,
    )


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Weights by logical name, with the balancing biases."""
    logical = {e.name: value.clone() for _, e, value in trainer.state.logical(lambda bucket: bucket.parameters)}
    return logical | {name: bias.clone() for name, bias in trainer.state.biases.items()}


def watched(forward: Callable[..., None], seen: list[tuple[Tensor, Tensor | None]]) -> Callable[..., None]:
    """The emitted forward, recording the logits it keeps for the backward."""

    def body(c: Any, p: Any, g: Any, micro_batch: int) -> None:
        forward(c, p, g, micro_batch)
        values = c.values(0, micro_batch)
        mtp = getattr(values, "M0_head_linear_0", None)
        seen.append((values.head_linear_0.clone(), None if mtp is None else mtp.clone()))

    return body


def test_logits_agree(trained: Trained) -> None:
    for logits_BSV in (trained.logits_BSV, trained.mtp_logits_BSV):
        assert logits_BSV is None or logits_BSV.std() > 0.1, "zeros would agree with anything"
    main, mtp = trained.differences(trained.logical)
    assert main <= TOLERANCE and mtp <= TOLERANCE, (main, mtp)


def kind(name: str) -> str:
    """The name with every layer and expert index replaced by *."""
    return re.sub(r"\b\d+\b", "*", name)


def test_a_changed_weight_changes_the_logits(trained: Trained) -> None:
    """One tensor of every kind is changed by noise of a tenth, a bias so far that every token chooses one expert."""
    compared = [name for name in trained.logical if trained.mtp_tokens_BS is not None or not name.startswith("mtp")]
    one_of_each = {kind(name): name for name in sorted(compared, reverse=True)}
    generator = torch.Generator().manual_seed(0)
    for name in one_of_each.values():
        tensor = trained.logical[name].clone()
        if name.endswith("router.bias"):
            tensor[0] += 1.0
        else:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
        main, mtp = trained.differences(trained.logical | {name: tensor})
        assert (mtp if name.startswith("mtp") else main) > DIFFERENT, name
        assert main <= TOLERANCE or not name.startswith("mtp"), "MTP has no part in the main logits"
