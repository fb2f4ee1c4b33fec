"""`dsc train` of models with norms after sublayers, on two pipeline ranks, against the independent model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dsl.load import load
from runtime.data.samples import Samples
from tests.reference.config import Config
from tests.reference.model import Reference
from tests.runtime.run.place import DENSE, FOUR_RANKS, Place, rows, saved

SEQUENCE, BATCH = 16, 8
TWO_RANKS = dict(FOUR_RANKS, expert=1, devices=2, precision="fp64", steps=7)


@pytest.mark.parametrize("norm", ["post", "sandwich"])
def test_losses_equal_the_independent_model(norm: str, place: Place) -> None:
    """The run's next loss after a checkpoint equals the model's loss with the checkpoint's weights."""
    place.compile(dict(TWO_RANKS, model=DENSE.replace("norm_eps", f"norm = {norm}, norm_eps")))
    place.dsc("train", "--out", "run")
    run = place.folder / "run"
    values = load(place.folder / "tiny.dsc").model.model_dump(mode="json")
    reference = Reference(Config.from_plan(values | {"sequence": SEQUENCE})).double()
    for step in (3, 6):
        checkpoint = saved(run, step)
        named = checkpoint.read([name for name in checkpoint.shapes if name.startswith("weight/")])
        assert {name.rpartition(".")[2] for name in named if name.endswith("norm")} >= {"post_norm"}
        reference.load_logical({name.removeprefix("weight/"): tensor for name, tensor in named.items()})
        loss = reference.losses(*batch_of(run, step)).main.item()
        assert rows(run)[step]["loss"] == pytest.approx(loss, rel=1e-12), step
    losses = [row["loss"] for row in rows(run)]
    assert losses[-1] < losses[0] - 0.05


def batch_of(run: Path, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The samples of the step after `step`, and their targets one and two tokens ahead."""
    (folder,) = (path for path in (run / "data").iterdir() if path.is_dir())
    samples = Samples(folder, "train", SEQUENCE, 2, seed=1)
    z = torch.from_numpy(np.stack([samples.tokens(i) for i in range(step * BATCH, (step + 1) * BATCH)]))
    return z, z[:, 1 : SEQUENCE + 1], z[:, 2 : SEQUENCE + 2]
