"""An optimizer is a row and a file: the example of docs/extending.md is planned, trained and resumed in a copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsl.schema import OPTIMIZERS
from dsl.schema.optimizers import SHARED
from runtime.checkpoint.loading import LoadedCheckpoint, load
from runtime.state.optimizers import reference_update
from tests.extending import ROOT, Copy, extension, files_of_table

TITLE = "A new optimizer"
MATRIX = '    unit: ClassVar = "matrix"\n'
SPEC = """\
import "specs/tiny.dsc"

run mine extends tiny {
  cluster   = two
  parallel  { pipeline = 1, data = 2, zero = 1 }
  train {
    steps = 4, batch = 8
    optimizer spectral { beta = 0.9, weight_decay = 0.1 }
    checkpoint { every = 2 steps, keep = 10 }
  }
  data { source = "words.txt", tokenizer = train(512), validation = 0% }
}
cluster two extends one { node { devices = 2, device cpu { cores = 2 } } }
"""
MINE = "mine.dsc:mine"
NAMED_IN = {
    "dsl/schema/optimizers.py": "the rows",
    "dsl/schema/run.py": "examples of specs",
    "dsl/schema/train.py": "examples of specs",
    "dsl/reference/topics.py": "an example of a spec",
    "dsl/facts/vocabulary.py": "what to write for words of other systems",
    "compiler/tools/importers/first_run.py": "a template of specs",
    "compiler/tools/importers/plan_ledger.py": "the optimizer of plans of other systems",
    "compiler/tools/importers/torchtitan.py": "the name of a function of torchtitan",
    "compiler/tools/exporters/planned.py": "what to write for other systems",
    "runtime/observe/calibrate.py": "a function of torch that streams like an update",
}
WORDS = " ".join(f"{left} {right}" for left in range(300) for right in ("and", "or", "not", left * left, left**3))


@pytest.fixture(params=["matrix", "element"])
def copy(tmp_path: Path, request: pytest.FixtureRequest) -> Copy:
    """The project with the example: unchanged, and with state sharded anywhere."""
    copy = Copy(tmp_path, extension(TITLE))
    if request.param == "element":
        row = tmp_path / "dsl" / "schema" / "optimizers.py"
        text = row.read_text("utf-8")
        begin, anchor, end = text.rpartition(MATRIX)
        assert anchor
        body, _, last = end.partition("    def flops")
        row.write_text(begin + body + last[last.index("# Optimizers that a run may name") :], "utf-8")
    (tmp_path / "mine.dsc").write_text(SPEC, "utf-8")
    (tmp_path / "words.txt").write_text(WORDS, "utf-8")
    return copy


def tensors(checkpoint: LoadedCheckpoint) -> dict[str, torch.Tensor]:
    return dict(checkpoint.read(checkpoint.shapes))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_table_names_the_files_of_the_page() -> None:
    assert extension(TITLE).files == files_of_table("optimizer", "spectral")


def test_a_new_optimizer_is_planned(copy: Copy) -> None:
    """The plan's bytes, owners and time match what ranks allocate."""
    copy.run("-m", "tests.extended_optimizer", MINE)


def test_a_new_optimizer_trains(copy: Copy) -> None:
    """On two ranks that share its state; and it is resumed to the bit."""
    for words in (("straight",), ("broken", "--steps", "2"), ("broken", "--resume")):
        output = copy.dsc("train", MINE, "--cache", "shared", "--out", *words)
        assert "not bit for bit" not in output
    straight, broken = (tensors(load(copy.folder / run / "checkpoints")) for run in ("straight", "broken"))
    assert {name.partition("/")[0] for name in straight} == {"weight", "momentum", "bias"}
    assert equal(straight, broken)
    copy.dsc("train", MINE, "--cache", "shared", "--out", "whole", "-s", "parallel.zero=0")
    unsharded = tensors(load(copy.folder / "whole" / "checkpoints"))
    assert equal(unsharded, straight), "who owns what changes no weight"


def named_in(package: str) -> Iterator[str]:
    """The files of a package that contain the name of a kind or of a tensor of its state."""
    words = {*OPTIMIZERS, *(tensor.name for row in OPTIMIZERS.values() for tensor in row.state)}
    for path in sorted((ROOT / package).rglob("*.py")):
        if any(word in path.read_text("utf-8") for word in words):
            yield path.relative_to(ROOT).as_posix()


def test_an_optimizer_is_named_in_its_row_and_its_file() -> None:
    files = {path for package in ("dsl", "compiler", "runtime") for path in named_in(package)}
    own_files = {
        f"{folder}/{kind}.py" for kind in OPTIMIZERS for folder in ("runtime/state/optimizers", "compiler/emit/kernels")
    }
    assert files - own_files == set(NAMED_IN)


def test_each_row_has_its_file() -> None:
    files = {path.stem for path in (ROOT / "runtime" / "state" / "optimizers").glob("*.py")} - {"__init__"}
    assert files == set(OPTIMIZERS)
    for kind, row in OPTIMIZERS.items():
        assert reference_update(kind).__name__ == kind
        assert {*SHARED} <= set(row.model_fields)
