"""An interrupted and resumed run ends as an uninterrupted one, and any plan of a model loads its checkpoints."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.build.build import Build
from runtime.checkpoint.publish import LoadedCheckpoint, Publisher, RetentionPolicy, TensorPart, load
from runtime.checkpoint.shard_manifest import CheckpointError, render
from runtime.contract import RunPlan
from runtime.run.resume import expected_shapes, find
from runtime.state import snapshot
from runtime.state.state import build_state
from runtime.system.strict_json import tree
from tests.runtime.run.place import FOUR_RANKS, ONE_RANK, Place, bits, saved, untimed

AVERAGE = dict(validate=", ema = true", more="ema { decay = 0.9 }")
PLANS = {
    "dualpipe": FOUR_RANKS,
    "dualpipe, zero 1": dict(FOUR_RANKS, zero=1),
    "dualpipe, zero 1, bf16": dict(FOUR_RANKS, zero=1, precision="bf16"),
    "1f1b": ONE_RANK,
    "1f1b on two ranks": dict(ONE_RANK, pipeline=2, devices=2),
    "experts whole": dict(FOUR_RANKS, expert=1),
    "zbv, zero 2": dict(FOUR_RANKS, schedule="zbv", zero=2),
    "dualpipe, zero 3": dict(FOUR_RANKS, zero=3),
    "1f1b, zero 3, bf16": dict(FOUR_RANKS, schedule="1f1b", zero=3, precision="bf16"),
    "1f1b, zero 3 in copies": dict(FOUR_RANKS, pipeline=1, schedule="1f1b", zero=3, degrees=", shard = 2"),
    "experts over four ranks": dict(FOUR_RANKS, expert=4, devices=8, zero=1, batch=16),
}
PLANS = {name: settings | AVERAGE for name, settings in PLANS.items()}
TRAINED = (
    "dualpipe",
    "1f1b, zero 3, bf16",
    "dualpipe, zero 1, bf16",
    "dualpipe, zero 1",
    "zbv, zero 2",
    "dualpipe, zero 3",
    "1f1b, zero 3 in copies",
)


class Trained:
    """A place for each requested plan, with a run `straight` of six steps."""

    def __init__(self, new_place: Callable[[], Place]) -> None:
        self._new_place = new_place
        self._places: dict[str, Place] = {}

    def __getitem__(self, name: str) -> Place:
        if name not in self._places:
            place = self._places[name] = self._new_place()
            place.compile(PLANS[name])
            place.dsc("train", "--out", "straight")
        return self._places[name]


@pytest.fixture(scope="module")
def trained(new_place: Callable[[], Place]) -> Trained:
    return Trained(new_place)


@pytest.mark.parametrize("name", TRAINED)
def test_resuming_is_bit_exact(trained: Trained, name: str) -> None:
    place = trained[name]
    straight, broken = (place.folder / run for run in ("straight", "broken"))
    place.dsc("train", "--out", "broken", "--steps", 3)
    assert [row["step"] for row in untimed(broken)] == [1, 2, 3]
    done = place.dsc("train", "--out", "broken", "--resume")
    assert "going on from broken/checkpoints/step-00000003\n" in done.stdout
    assert "not bit for bit" not in done.stdout + done.stderr
    assert [row["step"] for row in untimed(broken)] == [1, 2, 3, 4, 5, 6]
    assert untimed(broken) == untimed(straight)
    assert (broken / "load.json").read_bytes() == (straight / "load.json").read_bytes()
    for step in (3, 6):
        assert bits(saved(broken, step)) == bits(saved(straight, step))
    early, late = bits(saved(broken, 3)), bits(saved(broken, 6))
    assert {name.partition("/")[0] for name in late} == {"weight", "moment1", "moment2", "ema", "bias"}
    assert {"validation_loss", "validation_ema_loss"} < untimed(straight)[-1].keys()
    unchanged = [name for name in late if early[name] == late[name]]
    assert not unchanged, "these did not change in three steps, so that they are equal shows nothing"


@pytest.mark.parametrize("name", TRAINED[1:])
def test_plans_of_one_model_train_alike(trained: Trained, name: str) -> None:
    """Losses differ only by the order of sums or by rounding, so one plan can resume from another's checkpoint."""
    expected, losses = ([row["loss"] for row in untimed(trained[n].folder / "straight")] for n in (TRAINED[0], name))
    narrow = PLANS[name].get("precision") == "bf16"
    assert losses == pytest.approx(expected, rel=2.0**-8 if narrow else 1e-5)


# ---------------------------------------------------------------- another plan


@pytest.fixture(scope="module")
def builds(new_place: Callable[[], Place]) -> dict[str, Build]:
    return {name: Build.open(new_place().compile(settings)) for name, settings in PLANS.items()}


@pytest.mark.parametrize("writer", TRAINED)
def test_any_plan_loads_any_checkpoint(
    trained: Trained, builds: dict[str, Build], writer: str, record_property: Callable[[str, object], None]
) -> None:
    """The state of all ranks of the reading plan after loading, put together, is bit-identical to what was saved."""
    checkpoint = saved(trained[writer].folder / "straight")
    tensors = checkpoint.read(checkpoint.shapes)
    for reader, build in builds.items():
        assert checkpoint.shapes == expected_shapes(build.plan), reader
        again, elements = held(build, checkpoint)
        for name, tensor in tensors.items():
            assert torch.equal(again[name].view(torch.int32), tensor.view(torch.int32)), (reader, name)
            assert elements[name] == tensor.numel(), f"{reader}: {name}: an element is saved by no rank, or by two"
    record_property("loads", len(builds))


def held(build: Build, checkpoint: LoadedCheckpoint) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Tensors that all ranks would save after loading, and the number of elements of each; compares replicas."""
    plan = build.plan
    tensors: dict[str, Tensor] = {}
    elements: dict[str, int] = {}
    weights: dict[str, Tensor] = {}
    for rank in range(plan.mesh.world):
        state = build_state(plan, rank, torch.device("cpu"))
        snapshot.put_state(state, checkpoint.read)
        for name, tensor in snapshot.take(state, plan, rank).items():
            part = tensor if isinstance(tensor, TensorPart) else TensorPart(tensor.reshape(-1), 0, tuple(tensor.shape))
            target = tensors.setdefault(name, torch.full(part.shape, torch.nan))
            target.view(-1)[part.start : part.start + part.values.numel()] = part.values
            elements[name] = elements.get(name, 0) + part.values.numel()
        ungathered = replace(state, buckets=tuple(bucket for bucket in state.buckets if not bucket.is_gathered))
        for _, entry, value in ungathered.logical(lambda bucket: bucket.parameters):
            assert torch.equal(weights.setdefault(entry.name, value), value), f"copies of {entry.name} differ"
    return tensors, elements


def test_resuming_with_another_plan_is_reported(trained: Trained, place: Place) -> None:
    """A run of four ranks is resumed with another plan: the next step has the loss that the four would have had."""
    place.compile(PLANS["1f1b"])
    run = place.folder / "run"
    source = trained["dualpipe"].folder / "straight"
    shutil.copytree(source / "checkpoints" / "step-00000003", run / "checkpoints" / "step-00000003")
    (run / "metrics.jsonl").write_bytes((source / "metrics.jsonl").read_bytes())
    done = place.dsc("train", "--out", run, "--resume", "--steps", 5)
    assert "not bit for bit as without the break, because this differs: mesh.pp 2 → 1" in done.stdout
    losses = [row["loss"] for row in untimed(run)]
    assert losses == pytest.approx([row["loss"] for row in untimed(source)][:5], rel=1e-5)


def test_nothing_to_do_is_reported(trained: Trained) -> None:
    place = trained["1f1b"]
    before = (place.folder / "straight" / "metrics.jsonl").read_bytes()
    done = place.dsc("train", "--out", "straight", "--resume")
    assert "nothing to do: step 6 of 6 is reached; set a later one with --steps" in done.stdout
    assert (place.folder / "straight" / "metrics.jsonl").read_bytes() == before


def test_another_model_is_refused(trained: Trained, place: Place) -> None:
    place.compile(dict(ONE_RANK, top_k=1))
    run = trained["1f1b"].folder / "straight"
    before = bits(saved(run))
    done = place.dsc("train", "--out", run, "--resume", "--steps", 9, code=2)
    assert "step-00000006 belongs to another model: model.layers.1.ffn.top_k 2 → 1" in done.stderr
    assert "report:" not in done.stdout, "there was no run"
    assert bits(saved(run)) == before


# ---------------------------------------------------------------- allowed differences, in one process


@pytest.fixture(scope="module")
def begun(trained: Trained) -> tuple[Path, Build, Path]:
    """(checkpoints, the build that wrote them, its prepared data)."""
    folder = trained["1f1b"].folder
    (corpus,) = (path.parent for path in (folder / "straight" / "data").glob("*/meta.json"))
    return folder / "straight" / "checkpoints", Build.open(folder / "build" / "tiny"), corpus


def changed(build: Build, path: str, value: Any) -> Build:
    """The build with one value of its plan changed, as if from another spec."""
    document = tree(build.plan)
    *parents, last = path.split(".")
    node = document
    for key in parents:
        node = node[int(key) if isinstance(node, list) else key]
    assert node[last] != value
    node[last] = value
    return replace(build, plan=RunPlan.from_json(json.dumps(document)), digest="0" * 64)


def test_the_same_build_prints_no_note(begun: tuple[Path, Build, Path]) -> None:
    resumption = find(*begun, "cpu")
    assert resumption.checkpoint.step == 6
    assert resumption.notes == (f"going on from {resumption.checkpoint.path}",)


def without_average(build: Build) -> Build:
    train = build.plan.train
    assert train.validate is not None
    train = replace(train, ema=None, validate=replace(train.validate, ema=False))
    return replace(build, plan=replace(build.plan, train=train), digest="0" * 64)


def test_an_average_may_end(begun: tuple[Path, Build, Path]) -> None:
    folder, build, corpus = begun
    notes = find(folder, without_average(build), corpus, "cpu").notes
    assert "the moving average of the checkpoint is not used" in notes and "not bit for bit" in notes[-1]


def test_an_average_may_begin(begun: tuple[Path, Build, Path], tmp_path: Path) -> None:
    """The average begins with the weights of the checkpoint."""
    folder, build, corpus = begun
    plain = without_average(build).plan
    tensors = snapshot.take(build_state(plain, 0, torch.device("cpu")), plain, 0)
    publisher = Publisher(tmp_path / "checkpoints", 0, 1, lambda: None, RetentionPolicy())
    publisher.save(6, tensors, load(folder).meta)
    resumption = find(tmp_path / "checkpoints", build, corpus, "cpu")
    assert "the checkpoint has no moving average of the weights: it begins with them" in resumption.notes
    state = build_state(build.plan, 0, torch.device("cpu"))
    for bucket in state.buckets:
        bucket.parameters.zero_()
    snapshot.put_state(state, resumption.checkpoint.read, averaged=False)
    for bucket in state.buckets:
        for piece in bucket.owned:
            assert piece.average is not None and torch.equal(piece.average, piece.master) and piece.average.any()


ARCHITECTURE = {
    "model.norm_eps": 1e-5,
    "model.attention.heads": 4,
    "model.attention.rope.theta": 500.0,
    "model.layers.1.ffn.top_k": 1,
    "model.layers.1.ffn.scale": 1.0,
    "model.layers.1.ffn.score": "softmax",
    "model.layers.1.ffn.normalize": False,
    "model.mtp": None,
}
RECIPE = {
    "model.name": "other",
    "model.init_std": 0.5,
    "model.layers.1.ffn.balance.sequence_loss": 0.0,
    "model.mtp.weight.0.value": 0.1,
    "train.seed": 2,
    "train.tokens": 10**6,
    "train.optimizer.weight_decay": 0.0,
    "precision.master": "float64",
    "zero": 1,
}


def test_a_bias_that_came_or_went_is_refused(begun: tuple[Path, Build, Path]) -> None:
    """`balance` only concerns training, but the existence of a bias changes what the model computes."""
    checkpoints, build, corpus = begun
    without = changed(changed(build, "model.layers.1.ffn.balance.bias_rate", None), "biases", [])
    with pytest.raises(CheckpointError, match=r"model: bias/layers\.1\.ffn\.router\.bias \(4,\) → none, bias/mtp\.0\."):
        find(checkpoints, without, corpus, "cpu")


@pytest.mark.parametrize("path", ARCHITECTURE)
def test_a_change_of_the_model_is_refused(begun: tuple[Path, Build, Path], path: str) -> None:
    checkpoints, build, corpus = begun
    with pytest.raises(CheckpointError, match=r"step-00000006 belongs to another model: model\."):
        find(checkpoints, changed(build, path, ARCHITECTURE[path]), corpus, "cpu")


@pytest.mark.parametrize("path", RECIPE)
def test_a_change_of_the_recipe_is_reported(begun: tuple[Path, Build, Path], path: str) -> None:
    checkpoints, build, corpus = begun
    last = find(checkpoints, changed(build, path, RECIPE[path]), corpus, "cpu").notes[-1]
    differs = last.removeprefix("not bit for bit as without the break, because this differs: ")
    assert differs.startswith(f"{path} ") and differs.count("→") == 1, last


def test_the_same_layers_written_in_other_ranges_are_the_same(begun: tuple[Path, Build, Path]) -> None:
    checkpoints, build, corpus = begun
    dense, moe = tree(build.plan.model.layers)
    one_range = changed(build, "model.layers", [dense, dict(moe, last=2)])
    two_ranges = changed(build, "model.layers", [dense, moe, dict(moe, first=2, last=2)])
    refusals = []
    for longer in (one_range, two_ranges):
        with pytest.raises(CheckpointError, match=r"model\.layers\.2\.ffn\.experts none → 4") as refusal:
            find(checkpoints, longer, corpus, "cpu")
        refusals.append(str(refusal.value))
    assert refusals[0] == refusals[1]


def test_another_tokenizer_is_refused_and_other_text_is_reported(
    begun: tuple[Path, Build, Path], tmp_path: Path
) -> None:
    checkpoints, build, corpus = begun
    meta = json.loads((corpus / "meta.json").read_text("utf-8"))
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"sha256": "0" * 64}), "utf-8")
    assert find(checkpoints, build, tmp_path, "cpu").notes[-1].endswith("because this differs: other text")
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"tokenizer": {"sha256": "0" * 64}}), "utf-8")
    with pytest.raises(CheckpointError, match="another tokenizer"):
        find(checkpoints, build, tmp_path, "cpu")


# ---------------------------------------------------------------- forged manifests


def forged(begun: tuple[Path, Build, Path], folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A folder with the newest checkpoint, with a manifest signed again over edited metadata."""
    source = saved(begun[0].parent)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source.path, folder / source.path.name)
    meta = json.loads(json.dumps(source.meta))
    edit(meta)
    text = render(replace(source.manifest, meta=meta))
    (folder / source.path.name / "manifest.json").write_text(text, "utf-8")
    return folder


def test_a_forged_range_of_layers_is_refused_at_once(begun: tuple[Path, Build, Path], tmp_path: Path) -> None:
    """Each would expand to 10⁹ entries or more."""
    huge = {"first": 0, "last": 10**9, "ffn": {"kind": "dense"}}
    wide = [{"first": 0, "last": 9999, "ffn": list(range(1000))}]
    for layers in ([huge], [dict(huge, last=10**30)], [dict(huge, last=5000)] * 10_000, wide, 7, [[]], [{"first": 0}]):

        def edit(meta: dict[str, Any], layers: Any = layers) -> None:
            meta["plan"]["model"]["layers"] = layers

        with pytest.raises(CheckpointError, match=r"manifest\.json: its plan has (invalid ranges of layers|more than)"):
            find(forged(begun, tmp_path / "forged", edit), *begun[1:], "cpu")


def test_no_escape_of_a_manifest_or_a_name_reaches_the_terminal(
    begun: tuple[Path, Build, Path], trained: Trained, tmp_path: Path
) -> None:
    def edit(meta: dict[str, Any]) -> None:
        meta |= {"torch": "\x1b[2J", "ops": {"\x9b31m": "\x07"}}
        meta["plan"] |= {"\x1b]0;title\x07": "\u202e", "train": {"seed": "\x1b[31m\n" * 500}}

    resumption = find(forged(begun, tmp_path / "checkpoints", edit), *begun[1:], "cpu")
    assert len(resumption.notes) == 2 + 2 and all(note.isprintable() and len(note) < 3000 for note in resumption.notes)
    (tmp_path / "checkpoints" / "step-00000006" / "shard.\x1b[2J").touch()
    with pytest.raises(CheckpointError, match=r"shard\.\\x1b\[2J: does not belong") as refused:
        find(tmp_path / "checkpoints", *begun[1:], "cpu")
    assert "\x1b" not in str(refused.value)
    place = trained["1f1b"]
    hostile = place.folder / "run\x1b[31m"
    shutil.copytree(tmp_path / "checkpoints", hostile / "checkpoints")
    done = place.dsc("train", "--out", hostile, "--resume", code=2)
    assert "no checkpoint is good" in done.stderr and "\x1b" not in done.stdout + done.stderr


def test_any_meta_data_is_used_or_refused_in_words(begun: tuple[Path, Build, Path], tmp_path: Path) -> None:
    """With random replacements of values in the metadata, CheckpointError is the only error."""
    choose = random.Random(0)
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    junk = [None, True, -1, 0, 3, 1 << 61, 1 << 80, 1.5, 1e308, "", "\x1b[31m", [], {}, [[]], {"a": []}, deep]
    refused = 0
    for _ in range(300):

        def edit(meta: dict[str, Any]) -> None:
            for _ in range(choose.choice([1, 1, 3])):
                node, key = choose.choice([*places(meta)])
                if choose.random() < 0.3 and isinstance(node, dict):
                    del node[key]
                else:
                    node[key] = choose.choice(junk)

        folder = forged(begun, tmp_path / "forged", edit)
        try:
            resumption = find(folder, *begun[1:], "cpu")
        except CheckpointError as error:
            refused += 1
            assert all(line.isprintable() for line in str(error).splitlines())
        else:
            resumption.position.draw(8)
            assert all(note.isprintable() for note in resumption.notes)
            loads = resumption.checkpoint.meta["loads"]
            assert all(torch.tensor(row).dtype == torch.int64 for row in loads.values())
    assert 100 < refused < 300


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of all values nested in a JSON value."""
    for key, nested in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(nested, dict | list):
            yield from places(nested)


def test_a_checkpoint_without_position_uses_that_of_this_build(begun: tuple[Path, Build, Path], tmp_path: Path) -> None:
    resumption = find(forged(begun, tmp_path / "old", lambda meta: meta.pop("position")), *begun[1:], "cpu")
    assert (resumption.position.next, resumption.position.tokens) == (48, 768)
    assert "does not say which samples it has seen: taken as 48" in resumption.notes[1]
