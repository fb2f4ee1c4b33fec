"""Padding only affects shapes: the same rows in longer sequences train to the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.load import load
from tests.runtime.data.chats import CHATML, said, write_model, write_rows
from tests.runtime.run.place import ONE_RANK, V3, Place, saved, spec_text, untimed

TEXT = 'data { source = "corpus/*.py", tokenizer = train(300), validation = 30% }'
CHAT = 'data { source = "chat/*.jsonl", tokenizer = "model/tokenizer.json", validation = 30%, chat { } }'
BALANCED = V3.replace("sequence_loss = 1e-4", "sequence_loss = 0.1").replace("vocab = 300", "vocab = 400")
PLAIN = "clip = 1.0 }"
MESHES: dict[str, dict[str, Any]] = {
    "experts": {"devices": 2, "expert": 2},
    "context": {"devices": 2, "tensor": ", context = 2"},
    "tensor": {"devices": 2, "tensor": ", tensor = 2"},
}


def trained(place: Place, name: str, sequence: int, model: str = BALANCED, clip: str = PLAIN, **mesh: Any) -> Path:
    settings = dict(ONE_RANK, model=model, precision="fp64", steps=3, name=name, top_k=2, **mesh)
    text = spec_text(settings).replace(TEXT, CHAT).replace("sequence = 16", f"sequence = {sequence}")
    text = text.replace(PLAIN, clip)
    path = place.folder / f"{name}.dsc"
    path.write_text(text, "utf-8")
    write_build(place.folder / "build" / name, compile_spec(load(path), segments=place.segments).files)
    place.dsc("train", path.name, "--out", name)
    return place.folder / name


def numbers(run: Path) -> dict[str, Any]:
    """The rows of steps without token counts, which include padding, and the final biases and loads of experts."""
    rows = [{name: value for name, value in row.items() if name != "tokens"} for row in untimed(run)]
    checkpoint = saved(run, 3)
    tensors = checkpoint.read(name for name in checkpoint.shapes if name.startswith("bias/"))
    biases = {name: bias.tolist() for name, bias in tensors.items()}
    return {"rows": rows, "biases": biases, "loads": checkpoint.meta["loads"]}


INDEXED = BALANCED.replace("kv_rank = 8", "kv_rank = 8\n    indexer {{ heads = 2, head_dim = 8, top_k = 3 }}")
SUMS = {"largest_logit": (BALANCED, "clip = 1.0, qk_clip = 0.001 }"), "index_loss": (INDEXED, PLAIN)}


@pytest.mark.parametrize("what", SUMS)
def test_sums_of_attention_leave_padding_out(place: Place, what: str) -> None:
    model, clip = SUMS[what]
    wanted, *longer = (
        numbers(trained(place, f"{what}_{name}", sequence, model, clip, **mesh))["rows"]
        for name, sequence, mesh in (("short", 32, {}), ("long", 96, {}), ("context", 96, MESHES["context"]))
    )
    assert all(row[what] for row in wanted)
    for actual in longer:
        for row, wanted_row in zip(actual, wanted, strict=True):
            assert row == {name: pytest.approx(value, rel=1e-9) for name, value in wanted_row.items()}


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    place = new_place()
    write_model(place.folder / "model", CHATML)
    rows = [[said("user", f"{i}?"), said("assistant", "yes " * (i % 4))] for i in range(40)]
    write_rows(place.folder / "chat" / "rows.jsonl", [{"messages": row} for row in rows])
    trained(place, "short", 32)
    return place


@pytest.mark.parametrize("mesh", ["", *MESHES])
def test_longer_sequences_train_to_the_same_numbers(place: Place, mesh: str) -> None:
    wanted = numbers(place.folder / "short")
    actual = numbers(trained(place, f"long{mesh}", 96, **MESHES.get(mesh, {})))
    assert any(any(load) for load in wanted["loads"].values())
    assert actual["loads"] == wanted["loads"] and actual["biases"] == wanted["biases"]
    for row, wanted_row in zip(actual["rows"], wanted["rows"], strict=True):
        assert row == {name: pytest.approx(value, rel=1e-9) for name, value in wanted_row.items()}
