"""One step of a build in this process: `python -m tests.compiler.emit.kernels.program BUILD OUT` saves its loss and
gradients.

Under TRITON_INTERPRET=1 the emitted program runs its emitted kernels, in Triton's interpreter, which is made to round
BF16 and E4M3 as the hardware does (rounding.py).
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from runtime.build.build import Build
from runtime.build.kernels import load_kernels
from runtime.launch.heartbeat import Board
from runtime.step.trainer import Trainer
from tests.runtime.step.samples import RandomSamples, steady_weight


def main(folder: Path, out: Path) -> None:
    build = Build.open(folder)
    samples = RandomSamples(build.plan.model.vocab, build.plan.train.sequence)
    trainer = Trainer(build, 0, samples, samples, Board(1).bind(0))
    for bucket, entry, _ in trainer.state.logical(lambda bucket: bucket.parameters):
        bucket.set_weight(entry, torch.from_numpy(steady_weight(entry.name, entry.shape)))
    sums = trainer.accumulate()
    tensors = {name: gradient.clone() for name, gradient in vars(trainer.state.gradients).items()}
    trainer.apply(sums)  # by the kernel that updates weights
    tensors |= {"loss": sums["loss"].clone(), "files": torch.tensor(load_kernels.cache_info().currsize)}
    save_file(tensors, out)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("tests.compiler.emit.kernels.rounding")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
