"""`dsc train` of a dense model that tensor ranks split, in real processes: as one rank does, and from its files."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch

from tests.runs.place import DENSE, FOUR_RANKS, ONE_RANK, Place, rows, saved, untimed

WIDE = dict(model=DENSE, precision="fp64", zero=1)
ALONE = ONE_RANK | WIDE
SPLIT = FOUR_RANKS | WIDE | dict(expert=1, schedule="zbv", tensor=", tensor = 2")
EXACT = 1e-10


@pytest.fixture(scope="module")
def alone(new_place: Callable[[], Place]) -> Place:
    return trained(new_place(), ALONE)


@pytest.fixture(scope="module")
def split(new_place: Callable[[], Place]) -> Place:
    return trained(new_place(), SPLIT)


def trained(place: Place, settings: dict[str, object]) -> Place:
    place.compile(settings)
    place.dsc("train", "--out", "straight")
    return place


def test_four_ranks_train_as_one(alone: Place, split: Place) -> None:
    first, other = (each.folder / "straight" for each in (alone, split))
    for row, wanted in zip(untimed(other), untimed(first), strict=True):
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(wanted[name], rel=EXACT)
    one, several = (saved(each) for each in (first, other))
    assert one.shapes == several.shapes and (one.world, several.world) == (1, 4)
    tensors = several.read(several.shapes)
    for name, wanted in one.read(one.shapes).items():
        assert torch.allclose(tensors[name], wanted, rtol=1e-8, atol=1e-12), name


@pytest.mark.parametrize("of", ["alone", "split"])
def test_a_run_goes_on_over_other_ranks(
    request: pytest.FixtureRequest, new_place: Callable[[], Place], of: str
) -> None:
    """The checkpoint of step 3 of one rank, and of four, goes on as the other, with the losses of both."""
    writer, settings = request.getfixturevalue(of), SPLIT if of == "alone" else ALONE
    place = new_place()
    place.compile(settings)
    source, run = writer.folder / "straight", place.folder / "run"
    shutil.copytree(source / "checkpoints" / "step-00000003", run / "checkpoints" / "step-00000003")
    (run / "metrics.jsonl").write_bytes((source / "metrics.jsonl").read_bytes())
    done = place.dsc("train", "--out", run, "--resume")
    assert "mesh.tp" in done.stdout
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows(run)] == pytest.approx([row["loss"] for row in rows(source)], rel=EXACT)
