"""Runs with initial weights: spec keys, refusals, and the path from import to export."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from compiler.cli.main import main
from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from compiler.tools.weights.config import NoFamilyError, publication
from compiler.tools.weights.tokenizer import files_for
from dsl.load import load as load_spec
from dsl.schema import Dense, LinearScaling, Rope, YarnScaling
from runtime.build.build import Build
from runtime.checkpoint import publish
from runtime.checkpoint.loading import load
from runtime.data import tokenizer as tokenizers
from runtime.state import snapshot
from runtime.state.state import build_state
from tests import forks
from tests.compiler.tools.weights.published import export, import_, loaded, random_model, weights
from tests.compiler.tools.weights.test_files import loss
from tests.compiler.tools.weights.test_hostile import FILE
from tests.runtime.step.samples import weight
from tests.runtime.step.specs import MOE, YARN, gqa, model, spec

TEXT = "".join(f"def function_{i % 7}(argument):\n    return argument + {i}\n\n" for i in range(400))


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the spec and the weights of a Llama in FP32, as the current folder."""
    monkeypatch.chdir(tmp_path)
    random_model("llama", torch.float32).save_pretrained("hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(tokenizers.to_json(tokenizers.train([TEXT], 290)), "utf-8")
    assert import_(Path("hf"), Path("m.dsc")) == 0
    return tmp_path


def dsc(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forks.run("compiler.cli.main", arguments, Path.cwd())


def test_import_train_export(imported: Path) -> None:
    """In processes, as users run them: the run starts from the weights, and the export has the trained ones."""
    Path("text.txt").write_text(TEXT, "utf-8")
    settings = ("-s", 'data.source="text.txt"', "-s", "train.sequence=32", "-s", "data.validation=0")
    trained = dsc("train", "m.dsc", "--steps", "1", "--out", "run", *settings)
    assert trained.returncode == 0, trained.stderr
    assert "the weights begin with those of m.weights/step-00000000" in trained.stderr + trained.stdout
    plan = json.loads(Path("build/pretrain/plan.json").read_text("utf-8"))
    assert plan["train"]["initial"]["model_type"] == "llama" and plan["train"]["initial"]["context"] == 64
    before, after = weights(imported / "m.weights"), weights(imported / "run" / "checkpoints")
    rate = json.loads(Path("run/metrics.jsonl").read_text("utf-8").splitlines()[0])["rate"]
    moved = [(after[name] - tensor).abs().max().item() for name, tensor in before.items()]
    assert 0 < max(moved) <= rate * 1.2, "one step of AdamW from the weights, not from random ones"
    exported = dsc("export", "hf", "run", "-o", "out", "--dtype", "fp32")
    assert exported.returncode == 0, exported.stderr
    assert exported.stderr.startswith("wrote out: llama, 30 tensors")
    model = loaded(imported / "out")
    assert torch.equal(model.model.norm.weight, after["weight/final_norm"]) and 0 < loss(model) < 100
    tokenizer, ours = AutoTokenizer.from_pretrained(imported / "out"), tokenizers.train([TEXT], 290)
    assert tokenizer(TEXT)["input_ids"] == tokenizers.encode(ours, [TEXT])[0]
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert tokenizer.eos_token_id == tokenizers.end_id(ours) == model.config.eos_token_id
    assert export(Path("run@1"), Path("again"), "--dtype", "fp32") == 0
    assert (imported / "again" / FILE).read_bytes() == (imported / "out" / FILE).read_bytes()
    assert export(Path("run@7"), Path("none")) == 2
    resumed = dsc("train", "m.dsc", "--steps", "2", "--out", "run", "--resume", *settings)
    assert resumed.returncode == 0 and "the weights begin with" not in resumed.stderr + resumed.stdout


def test_the_tokenizer_comes_with_the_weights(imported: Path) -> None:
    assert load_spec("m.dsc").data.tokenizer == "m.weights/tokenizer.json"
    assert export(Path("m.weights"), Path("out")) == 0
    copied = [(imported / folder / "tokenizer.json").read_bytes() for folder in ("hf", "m.weights", "out")]
    assert copied[0] == copied[1] == copied[2]


def check(capfd: pytest.CaptureFixture[str]) -> str:
    """The messages of `dsc check m.dsc` for a wrong spec."""
    capfd.readouterr()
    assert main(["check", "m.dsc"]) == 2
    return capfd.readouterr().err


@pytest.mark.parametrize(("ids", "expected"), [(None, [0]), (7, [7, 0]), ([9, 7], [7, 9, 0]), ([7, 0], [7, 0]), (0, 0)])
def test_a_text_ends_where_the_run_ended_its_documents(ids: object, expected: object, tmp_path: Path) -> None:
    """`transformers` only reads the ids of generation_config.json; a base model has other ids than a chat model."""
    text = tokenizers.to_json(tokenizers.train([TEXT], 290))
    data = tmp_path / "data" / "key"
    data.mkdir(parents=True)
    (data / "tokenizer.json").write_text(text, "utf-8")
    (data / "generation_config.json").write_text(json.dumps({"top_k": 20, "eos_token_id": ids}), "utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()
    files, end = files_for(tmp_path / "checkpoints" / "step-00000001", digest, 64)
    assert end == 0 and json.loads(files["generation_config.json"]) == {"top_k": 20, "eos_token_id": expected}


def test_a_missing_checkpoint(imported: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (imported / "m.weights").rename(imported / "elsewhere")
    line = next(i for i, text in enumerate(Path("m.dsc").read_text("utf-8").splitlines(), 1) if "initial" in text)
    messages = check(capfd)
    assert f"error[W0101]: there is no folder m.weights\n  --> m.dsc:{line}:15\n" in messages
    assert main(["compile", "m.dsc"]) == 2
    assert main(["explain", "W0101"]) == 0


def test_a_checkpoint_of_another_model(imported: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = Path("m.dsc").read_text("utf-8")
    Path("m.dsc").write_text(text.replace("layers 0..2", "layers 0..3").replace("inner = 22", "inner = 24"), "utf-8")
    messages = check(capfd)
    assert "m.weights/step-00000000 is of another model: layers.3.attention.norm is missing" in messages
    Path("m.dsc").write_text(text.replace("inner = 22", "inner = 24"), "utf-8")
    assert "layers.0.ffn.up is 44 × 16, but 48 × 16 in the model" in check(capfd)


def test_a_checkpoint_that_changed(imported: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The build has the digest of the weights: with other weights it is rebuilt, or refused if run directly."""
    assert main(["compile", "m.dsc"]) == 0
    tensors = weights(imported / "m.weights")
    meta = load(imported / "m.weights").meta
    tensors["weight/final_norm"] += 1
    publish.write(imported / "m.weights", 0, [tensors], meta)
    refused = dsc("train", "build/pretrain", "--steps", "1", "--out", "run")
    assert refused.returncode == 2
    assert "differs from the checkpoint that was compiled: compile the spec again" in refused.stderr


def test_damaged_weights_are_not_trained(imported: Path) -> None:
    (shard,) = (imported / "m.weights" / "step-00000000").glob("shard.*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    refused = dsc("train", "m.dsc", "--steps", "1", "--out", "run")
    assert refused.returncode == 2 and "its sha256 differs from the one in the manifest" in refused.stderr


@pytest.mark.parametrize(("pp", "ep", "dp", "zero"), [(2, 2, 2, 1), (1, 2, 4, 3)])
def test_every_plan_loads_them(pp: int, ep: int, dp: int, zero: int, tmp_path: Path, segments: Segments) -> None:
    """Ranks that hold parts, experts or copies all have the values of the checkpoint."""
    write_build(tmp_path / "build", compile_spec(spec(pp, ep, dp, 4, zero=zero), segments=segments).files)
    plan = Build.open(tmp_path / "build").plan
    names = [(f"weight/{parameter.name}", parameter.shape) for parameter in plan.parameters]
    names += [(f"bias/{router_bias.name}", router_bias.shape) for router_bias in plan.biases]
    tensors = {name: torch.from_numpy(weight(name, shape)) for name, shape in names}
    publish.write(tmp_path / "weights", 0, [tensors], {})
    checkpoint = load(tmp_path / "weights")
    for rank in range(plan.mesh.world):
        state = build_state(plan, rank, torch.device("cpu"))
        snapshot.put_weights(state, checkpoint.read, checkpoint.shapes)
        for name, bias in state.biases.items():
            assert torch.equal(bias, tensors[f"bias/{name}"])
        for bucket, entry in state.entries():
            full = tensors[f"weight/{entry.name}"].reshape(-1)
            if owned := bucket.owned_part(entry):
                of_entry, piece, of_piece = owned
                assert torch.equal(piece.master[of_piece], full[of_entry])
            if not bucket.is_gathered:
                assert torch.equal(bucket.parameters[entry.start : entry.end], full)


# ---------------------------------------------------------------- refused exports


def test_invalid_exports_write_nothing(imported: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (imported / "out").mkdir()
    (imported / "out" / "mine").touch()
    assert export(Path("m.weights"), Path("out")) == 2
    assert "out exists and is not empty" in capfd.readouterr().err
    assert export(Path("nowhere"), Path("new")) == 2 and export(Path("m.weights"), Path("new"), "--average") == 2
    stderr = capfd.readouterr().err
    assert "there is no folder nowhere" in stderr and "it has no moving average of the weights" in stderr
    assert not (imported / "new").exists()


def test_weights_are_not_written_over(imported: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("m.dsc").unlink()
    assert import_(Path("hf"), Path("m.dsc")) == 2
    assert "m.weights exists beside m.dsc" in capfd.readouterr().err
    (imported / "m.weights" / "mine").touch()
    assert import_(Path("hf"), Path("m.dsc"), "--force") == 2
    assert "it has files that dsc did not write" in capfd.readouterr().err
    (imported / "m.weights" / "mine").unlink()
    assert import_(Path("hf"), Path("m.dsc"), "--force") == 0
    assert import_(Path("hf"), Path("n.dsc"), "--config-only") == 0
    assert not (imported / "n.weights").exists() and load_spec("n.dsc").train.initial is None


@pytest.mark.parametrize("scaling", [None, LinearScaling(factor=4.0), YARN], ids=["none", "linear", "yarn"])
def test_the_scaling_of_rope_is_written_under_both_keys(scaling: LinearScaling | YarnScaling | None) -> None:
    """`rope_scaling` is what programs before transformers 5 read; it is not there where nothing is scaled."""
    rotated = gqa(qk_norm="head").model_copy(update={"rope": Rope(theta=100.0, scaling=scaling)})
    config = publication(model(rotated, Dense(inner=12), Dense(inner=12), mtp=False), 8).config
    rope_parameters = config["rope_parameters"]
    assert config["rope_theta"] == rope_parameters["rope_theta"] == 100.0
    assert rope_parameters["rope_type"] == (scaling.kind if scaling else "default")
    expected = {key: value for key, value in rope_parameters.items() if key != "rope_theta"} if scaling else None
    assert config.get("rope_scaling") == expected


def test_a_model_that_no_family_describes() -> None:
    """Norms around parts with experts, and a bound of logits: the features in the way are named."""
    with pytest.raises(NoFamilyError) as raised:
        changes = {"norm": "sandwich", "logit_cap": 30.0}
        publication(model(gqa(qk_norm="head"), MOE, MOE, mtp=False).model_copy(update=changes), 8)
    message = "no family describes this model; the nearest, glm4_moe, differs: "
    assert str(raised.value) == f"{message}norm is sandwich, but pre there; logit_cap is 30.0, but None there"
