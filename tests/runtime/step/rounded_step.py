"""The first step of a build in this process: as it is, or in FP32 with rounding wherever BF16 rounds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from runtime.build.build import Build
from runtime.launch.heartbeat import Board
from runtime.step.trainer import Trainer
from tests.compiler.model.segments.rounding import rounding
from tests.runtime.step.samples import RandomSamples, weight


def first_step(folder: Path, rounded: int | Literal["nearest"] | None = None) -> dict[str, Tensor]:
    """Gradients by logical name, and losses, from weights representable in BF16. `rounded`: at random with this seed,
    or to nearest."""
    build = Build.open(folder)
    samples = RandomSamples(build.plan.model.vocab, build.plan.train.sequence)
    trainer = Trainer(build, 0, samples, samples, Board(1).bind(0))
    for bucket, entry, _ in trainer.state.logical(lambda bucket: bucket.parameters):
        bucket.set_weight(entry, torch.from_numpy(weight(entry.name, entry.shape)).to(torch.bfloat16))
    for name, bias in trainer.state.biases.items():
        bias.copy_(torch.from_numpy(weight(name, tuple(bias.shape))))
    package = f"dsc_build_{build.digest[:16]}"
    segments = [vars(module) for name, module in sys.modules.items() if name.startswith(f"{package}.segments.")]
    assert segments
    before = [dict(namespace) for namespace in segments]
    if rounded is not None:
        generator = None if rounded == "nearest" else torch.Generator().manual_seed(rounded)
        for namespace in segments:
            rounding(namespace, generator)
    sums = trainer.accumulate()
    for namespace, names in zip(segments, before, strict=True):
        namespace.update(names)
    result = {e.name: value.clone() for _, e, value in trainer.state.logical(lambda bucket: bucket.gradients)}
    return result | {name: sums[name] for name in ("loss", "mtp_loss") if name in sums}
