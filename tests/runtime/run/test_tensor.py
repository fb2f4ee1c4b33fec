"""`dsc train` with tensor parallelism, in real processes: as on one rank, and from its files."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch

from tests.runtime.run.place import DENSE, FOUR_RANKS, ONE_RANK, V3, Place, rows, saved, untimed

WIDE = dict(precision="fp64", zero=1)
BIASED = dict(model=V3.replace("moe {{", "moe {{\n      bias = true"))  # unsharded biases
RUNS = {
    "dense": ONE_RANK | WIDE | dict(model=DENSE),
    "split dense": FOUR_RANKS | WIDE | dict(model=DENSE, expert=1, schedule="zbv", degrees=", tensor = 2"),
    "experts": ONE_RANK | WIDE | BIASED,
    "split sequences": FOUR_RANKS | WIDE | BIASED | dict(expert=1, degrees=", context = 2"),
    "split experts": FOUR_RANKS | WIDE | BIASED | dict(expert=1, degrees=", expert_tensor = 2"),
}
EXACT = 1e-10


@pytest.fixture(scope="module")
def trained(new_place: Callable[[], Place]) -> Callable[[str], Place]:
    """A function from a name in RUNS to a place with its run `straight`; each is trained once."""
    places: dict[str, Place] = {}

    def run(name: str) -> Place:
        if name not in places:
            places[name] = new_place()
            places[name].compile(RUNS[name])
            places[name].dsc("train", "--out", "straight")
        return places[name]

    return run


@pytest.mark.parametrize(
    ("name", "split"),
    [("dense", "split dense"), ("experts", "split experts"), ("experts", "split sequences")],
)
def test_four_ranks_train_as_one(trained: Callable[[str], Place], name: str, split: str) -> None:
    first, divided = (trained(run_name).folder / "straight" for run_name in (name, split))
    for row, wanted in zip(untimed(divided), untimed(first), strict=True):
        for key in ("loss", "grad_norm"):
            assert row[key] == pytest.approx(wanted[key], rel=EXACT)
    single, several = (saved(run) for run in (first, divided))
    assert single.shapes == several.shapes and (single.world, several.world) == (1, 4)
    tensors = several.read(several.shapes)
    for key, wanted in single.read(single.shapes).items():
        assert torch.allclose(tensors[key], wanted, rtol=1e-8, atol=1e-12), key


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("experts", "split experts", "mesh.etp"),
        ("dense", "split dense", "mesh.tp"),
        ("split dense", "dense", "mesh.tp"),
        ("experts", "split sequences", "mesh.cp"),
        ("split experts", "experts", "mesh.etp"),
    ],
)
def test_a_run_resumes_on_other_ranks(
    trained: Callable[[str], Place], new_place: Callable[[], Place], before: str, after: str, changed: str
) -> None:
    """The checkpoint of step 3 of one rank is resumed on four, and vice versa, with the losses of both."""
    place = new_place()
    place.compile(RUNS[after])
    source, run = trained(before).folder / "straight", place.folder / "run"
    shutil.copytree(source / "checkpoints" / "step-00000003", run / "checkpoints" / "step-00000003")
    (run / "metrics.jsonl").write_bytes((source / "metrics.jsonl").read_bytes())
    done = place.dsc("train", "--out", run, "--resume")
    assert changed in done.stdout
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows(run)] == pytest.approx([row["loss"] for row in rows(source)], rel=EXACT)
