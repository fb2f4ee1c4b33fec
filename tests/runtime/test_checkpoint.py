"""Checkpoints: any number of ranks reads exactly what was saved, and nothing else is ever accepted."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from runtime.checkpoint.loading import DTYPES
from runtime.checkpoint.publish import CheckpointError, Publisher, RetentionPolicy, TensorPart, latest, load
from tests.runtime.faulty_files import save_all


def some_tensors(seed: int) -> dict[str, Tensor]:
    """All dtypes, no dimensions, no elements, a non-contiguous view, negative zero, NaN."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(0, 255, (24,), dtype=torch.uint8, generator=generator)
    tensors = {
        f"weight/of.{name.lower()}": (base > 99 if name == "BOOL" else base.view(dtype))
        for name, dtype in DTYPES.items()
    }
    tensors["moment1/layers.3.ffn.experts.17.up"] = torch.randn(6, 4, generator=generator).t()
    tensors["bias/layers.3.ffn.router.bias"] = torch.tensor([0.0, -0.0, float("nan"), float("inf")])
    tensors["state/step"] = torch.tensor(seed)
    tensors["state/none"] = torch.empty(3, 0)
    return tensors


def split(tensors: Mapping[str, Tensor], world: int, seed: int) -> list[Mapping[str, Tensor | TensorPart]]:
    """Assign each tensor to a random rank, or random parts of its elements to all ranks."""
    choose = random.Random(seed)
    shards: list[dict[str, Tensor | TensorPart]] = [{} for _ in range(world)]
    for name, tensor in tensors.items():
        if tensor.numel() < 2 or choose.random() < 0.5:
            shards[choose.randrange(world)][name] = tensor
            continue
        cuts = sorted(choose.randrange(tensor.numel() + 1) for _ in range(world - 1))
        flat = tensor.contiguous().view(-1)
        for rank, (start, end) in enumerate(itertools.pairwise([0, *cuts, tensor.numel()])):
            shards[rank][name] = TensorPart(flat[start:end], start, tuple(tensor.shape))
    choose.shuffle(shards)
    return list(shards)


def bits(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).tolist()


def assert_holds(checkpoint: Any, tensors: Mapping[str, Tensor]) -> None:
    read = checkpoint.read(tensors)
    assert {name: bits(t) for name, t in read.items()} == {name: bits(t) for name, t in tensors.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_other_programs_read_whole_tensors_in_their_shapes(folder: Path) -> None:
    tensors = {name: tensor for name, tensor in some_tensors(1).items() if tensor.dtype == torch.float32}
    assert save_all(folder, 1, [tensors], keep=1) == [None]
    (shard,) = folder.rglob("*.safetensors")
    assert {name: tensor.shape for name, tensor in load_file(shard).items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }


def test_a_long_run_holds_no_manifest_of_a_removed_checkpoint(folder: Path) -> None:
    """A manifest names every tensor: a run that kept all of them grew with each save."""
    keep = RetentionPolicy(2)
    publisher = Publisher(folder, 0, 1, lambda: None, keep)
    for step in range(1, 8):
        publisher.save(step, some_tensors(step), {})
    assert len([*folder.glob("step-*")]) == 2
    assert len(publisher._parsed._manifests) <= 3 and len(keep._verified_identities) <= 3


@pytest.fixture
def two(folder: Path) -> Path:
    """A folder with checkpoints of steps 1 and 2, each from three ranks."""
    for step in (1, 2):
        assert save_all(folder, step, split(some_tensors(step), 3, step), keep=2) == [None] * 3
    return folder


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("world", [1, 2, 5])
def test_any_plan_reads_what_any_plan_saved(
    folder: Path, world: int, record_property: Callable[[str, object], None]
) -> None:
    tensors = some_tensors(7)
    for seed in range(10):
        assert save_all(folder, seed, split(tensors, world, seed)) == [None] * world
        for verify in (True, False):
            checkpoint = load(folder, verify=verify)
            assert_holds(checkpoint, tensors)
            assert (checkpoint.step, checkpoint.world, checkpoint.meta) == (seed, world, {"of": seed})
            assert checkpoint.shapes == {name: tuple(t.shape) for name, t in tensors.items()}
            for name, tensor in tensors.items():
                assert_holds(checkpoint, {name: tensor})
    record_property("loads", 10)


def test_shards_are_safetensors(two: Path) -> None:
    read = {name: t for r in range(3) for name, t in load_file(two / f"step-00000002/shard.{r}.safetensors").items()}
    tensors = some_tensors(2)
    assert {name.partition("@")[0] for name in read} == set(tensors)
    for name, tensor in tensors.items():
        parts = sorted((int(key.partition("@")[2] or 0), t) for key, t in read.items() if key.partition("@")[0] == name)
        flat = torch.cat([t.view(-1).view(torch.uint8) for _, t in parts])
        assert flat.tolist() == bits(tensor)[2]
        if len(parts) == 1:
            assert (parts[0][1].dtype, parts[0][1].shape) == (tensor.dtype, tensor.shape)


def test_equal_states_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shards = split(some_tensors(3), 3, 3)
        save_all(tmp_path / name, 5, [dict(sorted(s.items(), reverse=name == "b")) for s in shards])
    files = sorted(p.name for p in (tmp_path / "a/step-00000005").iterdir())
    assert files == ["manifest.json", *(f"shard.{r}.safetensors" for r in range(3))]
    for file in files:
        assert (tmp_path / "a/step-00000005" / file).read_bytes() == (tmp_path / "b/step-00000005" / file).read_bytes()


def test_missing_tensors_are_named(two: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-00000002 holds no weight/of.f128, x$"):
        load(two).read(["state/step", "weight/of.f128", "x"])


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: Not a directory"):
        load(tmp_path / "file")


# ---------------------------------------------------------------- which one is newest


def test_the_newest_stay_and_latest_names_the_last(folder: Path) -> None:
    for step in range(1, 6):
        save_all(folder, step, split(some_tensors(step), 2, step), keep=2)
    assert sorted(p.name for p in folder.iterdir()) == ["LATEST", "step-00000004", "step-00000005"]
    assert (folder / "LATEST").read_text() == "step-00000005\n"


def names_of(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "LATEST")


@pytest.mark.parametrize("bit", [1, 0x80])
def test_damaged_checkpoints_do_not_count_among_the_kept_ones(folder: Path, bit: int) -> None:
    """Two checkpoints are kept and step 2 is damaged: 1 stays when 3 is written, and goes when 4 is."""
    keep = RetentionPolicy(2)
    for step in (1, 2):
        save_all(folder, step, split(some_tensors(step), 2, step), keep)
    path = folder / "step-00000002" / "shard.1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= bit
    path.write_bytes(data)
    save_all(folder, 3, split(some_tensors(3), 2, 3), keep)
    assert names_of(folder) == ["step-00000001", "step-00000002", "step-00000003"]
    save_all(folder, 4, split(some_tensors(4), 2, 4), keep)
    assert names_of(folder) == ["step-00000003", "step-00000004"]
    with pytest.raises(CheckpointError, match="no checkpoint is good"):
        shutil.rmtree(folder / "step-00000004")
        (folder / "step-00000003" / "shard.0.safetensors").write_bytes(b"")
        load(folder)


def test_the_best_stay_and_so_does_every_nth(folder: Path) -> None:
    """Losses of steps 1 to 8; a NaN loss is never the best."""
    losses: list[Any] = [3.0, 1.0, 2.0, "0", 9.0, None, 50.0, 60.0]
    for step, loss in enumerate(losses, 1):
        meta = {"of": step} | ({"validation_loss": loss} if loss is not None else {})
        save_all(folder, step, split(some_tensors(step), 1, step), RetentionPolicy(2, best=2, every=4), meta)
    assert [int(name[5:]) for name in names_of(folder)] == [2, 3, 4, 7, 8]
    path = folder / "step-00000002" / "shard.0.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)  # the best is damaged: the next ones stay in its place
    save_all(folder, 9, split(some_tensors(9), 1, 9), RetentionPolicy(2, best=2, every=4), {"validation_loss": 70.0})
    assert [int(name[5:]) for name in names_of(folder)] == [3, 4, 7, 8, 9]


def test_a_step_saved_again_is_another_checkpoint_and_the_newest(two: Path) -> None:
    """A run resumed from step 1: the earlier checkpoint of step 2 is not overwritten."""
    save_all(two, 2, split(some_tensors(22), 2, 0), keep=3)
    save_all(two, 1, split(some_tensors(11), 2, 0), keep=3)
    assert sorted(p.name for p in two.iterdir() if p.name != "LATEST") == [
        "step-00000001.1",
        "step-00000002",
        "step-00000002.1",
    ]
    assert_holds(load(two), some_tensors(11))
    assert_holds(load(two / "step-00000002"), some_tensors(2))
    assert_holds(load(two / "step-00000002.1"), some_tensors(22))


def test_leftovers_of_an_interrupted_save_are_removed_by_the_next(two: Path) -> None:
    for name in (".tmp-9", ".purge-step-00000001.3"):
        (two / name).mkdir()
        (two / name / "shard.0.safetensors").write_bytes(b"half")
    (two / "notes").mkdir()  # not ours
    save_all(two, 3, split(some_tensors(3), 2, 3), keep=1)
    assert sorted(p.name for p in two.iterdir()) == ["LATEST", "notes", "step-00000003"]


# ---------------------------------------------------------------- refusals


def corrupt(folder: Path, kind: str, choose: random.Random) -> str:
    """Damage one file of a checkpoint in a folder of two. Returns its name."""
    path = choose.choice(sorted(p for p in folder.iterdir()))
    data = bytearray(path.read_bytes())
    offset = choose.randrange(len(data))
    if kind == "flip":
        data[offset] ^= 1 << choose.randrange(8)
    elif kind == "zero":
        size = choose.randint(1, 64)
        if not any(data[offset : offset + size]):
            data[offset] = 1
        else:
            data[offset : offset + size] = bytes(len(data[offset : offset + size]))
    elif kind == "truncate":
        del data[offset:]
    elif kind == "append":
        data += b"\0" if choose.random() < 0.5 else b"\n"
    elif kind == "insert":
        data.insert(offset, choose.randrange(256))
    elif kind == "swap":
        data = bytearray((folder.parent / "step-00000001" / path.name).read_bytes())
    elif kind == "exchange":
        path = folder / "shard.0.safetensors"
        data = bytearray((folder / "shard.1.safetensors").read_bytes())
    elif kind == "foreign":
        path = folder / "shard.3.safetensors"
    path.write_bytes(data)
    if kind == "delete":
        path.unlink()
    return path.name


KINDS = ("flip", "zero", "truncate", "append", "insert", "swap", "exchange", "foreign", "delete")


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_used(
    two: Path, kind: str, record_property: Callable[[str, object], None]
) -> None:
    newest = two / "step-00000002"
    pristine = two.parent / "pristine"
    shutil.copytree(newest, pristine)
    choose = random.Random(kind)
    for _ in range(60):
        file = corrupt(newest, kind, choose)
        with pytest.raises(CheckpointError, match=f"step-00000002/{file}"):
            load(newest)
        with pytest.raises(CheckpointError, match=f"step-00000002/{file}"):
            load(newest, verify=False).read(some_tensors(2))
        previous = load(two)
        assert previous.path == two / "step-00000001" and len(previous.refused) == 1
        assert f"step-00000002/{file}" in previous.refused[0]
        assert_holds(previous, some_tensors(1))
        shutil.rmtree(newest)
        shutil.copytree(pristine, newest)
    assert_holds(load(two), some_tensors(2))
    record_property("corruptions", 60)


def test_all_damaged_is_an_error_and_not_a_new_beginning(two: Path) -> None:
    for step in (1, 2):
        (two / f"step-0000000{step}" / "shard.1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint is good:\n.*shard.1.safetensors: No such file"):
        latest(two)


@pytest.mark.parametrize("name", ["manifest.json", "shard.1.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.usefixtures("watched")
def test_links_and_pipes_are_refused(two: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = two / "step-00000002" / name
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(CheckpointError, match=f"step-00000002/{name}"):
        load(two / "step-00000002")


@pytest.mark.usefixtures("watched")
def test_a_checkpoint_that_is_a_link_is_refused(two: Path, tmp_path: Path) -> None:
    (two / "step-00000002").rename(tmp_path / "elsewhere")
    (two / "step-00000002").symlink_to(tmp_path / "elsewhere")
    assert load(two).step == 1


def rewrite(path: Path, change: Any) -> None:
    """Write a hostile manifest: changed, with a matching sha256."""
    fields = json.loads((path / "manifest.json").read_text())
    del fields["sha256"]
    change(fields)
    body = json.dumps(fields)
    digest = hashlib.sha256(body.encode()).hexdigest()
    (path / "manifest.json").write_text(f'{body[:-1]}, "sha256": "{digest}"}}\n')


def _set(where: str, value: object) -> Any:
    *keys, last = where.split(".")

    def change(fields: Any) -> None:
        for key in keys:
            fields = fields[int(key) if key.isdigit() else key]
        fields[int(last) if last.isdigit() else last] = value

    return change


HOSTILE = {
    "path": _set("shards.0.file", "../../../etc/passwd"),
    "other shard": _set("shards.0.file", "shard.1.safetensors"),
    "negative size": _set("shards.0.size", -1),
    "huge size": _set("shards.0.size", 1 << 70),
    "bool for int": _set("step", True),
    "float for int": _set("step", 1.0),
    "name": _set("shards.0.tensors.0.0", "../x"),
    "name with NUL": _set("shards.0.tensors.0.0", "weight/a\0b"),
    "reserved name": _set("shards.0.tensors.0.0", "__metadata__"),
    "name no text": _set("shards.0.tensors.0.0", ["a"]),
    "dtype": _set("shards.0.tensors.0.1", "pickle"),
    "negative shape": _set("shards.0.tensors.0.2", [-1, -24]),
    "huge shape": _set("shards.0.tensors.0.2", [1 << 61, 1 << 61]),
    "many dimensions": _set("shards.0.tensors.0.2", [1] * 1000),
    "start": _set("shards.0.tensors.0.3", 5),
    "missing tensor": lambda fields: fields["shards"][0]["tensors"].pop(),
    "tensor twice": lambda fields: fields["shards"][0]["tensors"].append(fields["shards"][0]["tensors"][-1]),
    "fewer shards": lambda fields: fields["shards"].pop(),
    "world": _set("world", 7),
    "format": _set("format", "dsc checkpoint 2"),
    "extra field": _set("more", 1),
    "meta": _set("meta", []),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.usefixtures("watched")
def test_a_hostile_manifest_is_refused(two: Path, kind: str) -> None:
    rewrite(two / "step-00000002", lambda fields: None)
    assert load(two).step == 2  # the rewriting itself is sound
    rewrite(two / "step-00000002", HOSTILE[kind])
    with pytest.raises(CheckpointError, match=r"step-00000002/manifest.json: "):
        load(two / "step-00000002")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "[" * 100_000, "NaN", "1" * 5000, '"\\ud800"', "{" + " " * 9000]
)
@pytest.mark.usefixtures("watched")
def test_a_manifest_that_is_none_is_refused(two: Path, text: str) -> None:
    (two / "step-00000002" / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"step-00000002/manifest.json: "):
        load(two / "step-00000002")


@pytest.mark.parametrize(
    "name", ["", "a b", "../a", "/a", "a/", "a//b", "a..b", "ä", "a\n", "__metadata__", "a@1", "x" * 501]
)
@pytest.mark.usefixtures("watched")
def test_a_bad_name_is_refused_before_anything_is_written(folder: Path, name: str) -> None:
    (error,) = save_all(folder, 1, [{name: torch.zeros(1)}])
    assert isinstance(error, ValueError) and not folder.exists()


def test_meta_that_is_not_json_is_refused_before_anything_is_written(folder: Path) -> None:
    (error,) = save_all(folder, 1, [{"a": torch.zeros(1)}], meta={"loss": float("nan")})
    assert isinstance(error, ValueError) and not folder.exists()


ZEROS = torch.zeros(4)


@pytest.mark.parametrize(
    ("shards", "problem"),
    [
        ([{"a": ZEROS}, {"a": ZEROS}], "a: elements 0 to 4 are held twice"),
        ([{"a": TensorPart(ZEROS, 0, (8,))}, {"b": ZEROS}], "a: elements 4 to 8 are missing"),
        ([{"a": TensorPart(ZEROS, 4, (8,))}, {"b": ZEROS}], "a: elements 0 to 4 are missing"),
        ([{"a": TensorPart(ZEROS, 0, (8,))}, {"a": TensorPart(ZEROS, 3, (8,))}], "a: elements 3 to 4 are held twice"),
        (
            [{"a": TensorPart(ZEROS, 0, (8,))}, {"a": TensorPart(ZEROS.double(), 4, (8,))}],
            "a is F64 (8,) here, F32 (8,) there",
        ),
        ([{"a": torch.empty(0)}, {"a": torch.empty(0)}], "a is held twice"),
    ],
)
def test_every_element_is_saved_exactly_once(folder: Path, shards: Any, problem: str) -> None:
    errors = save_all(folder, 1, shards)
    assert all(isinstance(error, CheckpointError) for error in errors) and problem in str(errors[0])
    assert [p.name for p in folder.iterdir()] == []
