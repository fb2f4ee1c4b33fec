"""Both phases of sparse attention, in real processes: untrained weights stay, and interruptions leave no trace."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.load import load
from dsl.resolve.chosen import phases_in
from tests.runtime.processes import wait_for
from tests.runtime.run.place import ONE_RANK, Place, bits, rows, saved

TEXT = """
import "tiny.dsc"
run chosen extends tiny {
  model = small
  cluster = two
  parallel { pipeline = 2, zero = 1 }
  train { only = indexer }
  phase sparse { train { only = none, steps = 6, rate { constant at 5e-4 } } }
}
model small extends tiny { attention mla { indexer { heads = 3, head_dim = 8, top_k = 5 } } }
cluster two { nodes = 1, node { devices = 2, device cpu { cores = 1, memory = 4GB } } }
"""
SETTINGS = dict(ONE_RANK, precision="fp64", batch=4, steps=4)
LAST, END = 4, 10  # last steps of the first and the second phase


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A folder with the spec and its phases' builds."""
    place = new_place()
    place.write(SETTINGS)
    path = place.folder / "chosen.dsc"
    path.write_text(TEXT, "utf-8")
    for name in phases_in(path):
        write_build(place.folder / "build" / name, compile_spec(load(path, name), segments=place.segments).files)
    return place


@pytest.fixture(scope="module")
def straight(place: Place) -> Path:
    """The uninterrupted run."""
    output = place.dsc("train", "chosen.dsc", "--out", "straight").stdout
    assert "phase 2 of 2 begins after step 4: nothing differs" in output and "not bit for bit" not in output
    return place.folder / "straight"


def test_only_indexers_change_in_the_first_phase(straight: Path) -> None:
    """All other weights and moments stay unchanged in the first phase; then all change."""
    early, last, end = (saved(straight, step) for step in (3, LAST, END))
    names = {name for name in last.shapes if not name.startswith("bias/")}
    before, after, behind = (checkpoint.read(names) for checkpoint in (early, last, end))
    of_indexers = {name for name in names if ".indexer." in name}
    assert of_indexers and {name for name in names if not torch.equal(before[name], after[name])} == of_indexers
    moments = {name for name in names - of_indexers if not name.startswith("weight/")}
    assert moments and not any(after[name].any() for name in moments)
    assert all(behind[name].any() for name in moments if ".experts." not in name)
    assert all(not torch.equal(after[name], behind[name]) for name in of_indexers)
    losses = [row["index_loss"] for row in rows(straight)]
    assert len(losses) == END and all(loss > 0 for loss in losses)


@pytest.mark.parametrize("breaks", [(2, LAST), (LAST, 7)], ids=str)
def test_a_break_leaves_no_trace(place: Place, straight: Path, breaks: tuple[int, ...]) -> None:
    """A run that ends within a phase, or between both, is resumed with the same bits."""
    name = f"broken at {breaks}"
    for step in breaks:
        place.dsc("train", "chosen.dsc", "--out", name, "--resume", "--steps", step)
        assert rows(place.folder / name)[-1]["step"] == step
    place.dsc("train", "chosen.dsc", "--out", name, "--resume")
    assert bits(saved(place.folder / name, END)) == bits(saved(straight, END))


def test_a_kill_in_the_second_phase_leaves_no_trace(place: Place, straight: Path) -> None:
    words = ("train", "chosen.dsc", "--out", "killed", "--resume")
    run = place.folder / "killed"
    with place.started(*words) as running:
        wait_for(lambda: (run / "checkpoints" / "step-00000006").is_dir(), "a save of the second phase")
        os.kill(running.process.pid, signal.SIGKILL)
        running.ends()
    place.dsc(*words)
    assert bits(saved(run, END)) == bits(saved(straight, END))


def test_a_checkpoint_without_indexers_begins_a_run(place: Place) -> None:
    """Indexers begin at random, everything else with the weights of the checkpoint."""
    place.dsc("train", "tiny.dsc", "--out", "dense", "--steps", 2)
    text = TEXT.replace("run chosen", "run begun").replace("only = indexer", 'only = indexer, initial = "dense"')
    (place.folder / "begun.dsc").write_text(text, "utf-8")
    output = place.dsc("train", "begun.dsc", "--out", "begun", "--steps", 1).stdout
    assert (
        "tensors initialized at random, because the checkpoint does not have them: layers.0.attention.indexer.k"
        in output
    )
    dense, begun = saved(place.folder / "dense", 2), saved(place.folder / "begun", 1)
    names = {name for name in dense.shapes if name.startswith("weight/")}
    assert {n for n in begun.shapes if n.startswith("weight/") and n not in names} == {
        name for name in begun.shapes if name.startswith("weight/") and ".indexer." in name
    }
    theirs, ours = dense.read(names), begun.read(names)
    assert all(torch.equal(theirs[name], ours[name]) for name in names)
