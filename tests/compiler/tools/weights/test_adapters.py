"""Adapters on imported weights: gradients and steps against autograd, runs, and merged exports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from compiler.emit import recipe
from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from compiler.plan.read_files import with_files
from compiler.tools.inference.loaded import load_model
from compiler.tools.inference.sources import find_source
from compiler.tools.weights.adapter import Adapters, adapter_config
from compiler.tools.weights.checkpoint import imported_meta, published_name
from dsl.load import load as load_spec
from dsl.rules.adapter import matrices_of
from dsl.schema import Lora, Spec
from runtime.build.build import Build
from runtime.checkpoint import publish
from runtime.checkpoint.loading import load
from runtime.checkpoint.shard_manifest import BASE, Manifest, base_entry
from runtime.contract.weights import A, B, weight_of
from runtime.launch.heartbeat import Board
from runtime.run.resume import initial_weights
from runtime.state import snapshot
from runtime.step.trainer import Trainer
from runtime.system.strict_json import tree
from tests.compiler.tools.weights.published import (
    Wide,
    export,
    import_,
    loaded,
    random_model,
    weights,
    with_wide_angles,
)
from tests.compiler.tools.weights.test_runs import TEXT, dsc, imported
from tests.compiler.tools.weights.test_training import BATCH, DECAY, EXACT, RATE, SEQUENCE, STEPS, trained_as, within
from tests.runtime.step.ranks import logical as logical_of
from tests.runtime.step.samples import RandomSamples

__all__ = ["imported"]

RANK, ALPHA = 3, 6.0
HEAD = 6  # columns of a head of the Llama
# Matrix here → names in `transformers` of the parts of its rows, in order; * is an expert's index.
THERE = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_down": ("self_attn.q_a_proj",),
    "attention.q_up": ("self_attn.q_b_proj",),
    "attention.kv_down": ("self_attn.kv_a_proj_with_mqa",),
    "attention.kv_up": ("self_attn.kv_b_proj",),
    "attention.out": ("self_attn.o_proj",),
    "ffn.up": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn.down": ("mlp.down_proj",),
    "ffn.shared.up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "ffn.shared.down": ("mlp.shared_experts.down_proj",),
    "ffn.experts.*.up": ("mlp.experts.gate_up_proj",),
    "ffn.experts.*.down": ("mlp.experts.down_proj",),
}
ROTATED = ("self_attn.q_proj", "self_attn.k_proj")  # of the Llama, in halves there and in pairs here


def lora_of(spec: Spec) -> Lora:
    """Adapters on all matrices that support one."""
    return Lora(rank=RANK, alpha=ALPHA, on=tuple(matrices_of(spec.model)))


def random_adapters(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Values of A and B, neither of them 0, by logical name."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: (0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for name, shape in sorted(shapes.items())
    }


def merged(theirs: PreTrainedModel, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of their model that have adapters: W + alpha / rank · B · A, as tensors that autograd follows."""
    parameters = dict[str, Tensor](theirs.named_parameters())
    sizes = {name: parameter.shape for name, parameter in parameters.items()}
    changed: dict[str, Tensor] = {}
    for name in dict.fromkeys(map(weight_of, adapters)):
        _, layer, *path = name.split(".")
        expert = next((int(word) for word in path if word.isdigit()), None)
        parts = THERE[".".join("*" if word.isdigit() else word for word in path)]
        delta, start = ALPHA / RANK * adapters[name + B] @ adapters[name + A], 0
        for part in parts:
            full_name = f"model.layers.{layer}.{part}"
            if expert is not None:
                changed.setdefault(full_name, parameters[full_name].detach().clone())
                changed[full_name] = changed[full_name].index_add(0, torch.tensor([expert]), delta[None])
                continue
            full_name += ".weight"
            rows = delta[start : start + sizes[full_name][0]]
            start += len(rows)
            if part in ROTATED and "kv_b_proj" not in " ".join(parameters):
                rows = rows.unflatten(0, (-1, HEAD // 2, 2)).transpose(1, 2).flatten(0, 2)
            changed[full_name] = parameters[full_name].detach() + rows
    return changed


def logits_of(theirs: PreTrainedModel, adapters: dict[str, Tensor], tokens: Tensor) -> Tensor:
    kwargs = {"input_ids": tokens, "use_cache": False}
    logits: Tensor = functional_call(theirs, merged(theirs, adapters), kwargs=kwargs).logits
    return logits


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_gradients_and_five_steps(model_type: str, tmp_path: Path) -> None:
    theirs = random_model(model_type)
    theirs.save_pretrained(tmp_path / "hf")
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    spec = trained_as(load_spec(tmp_path / "m.dsc"), "fp64")
    spec = with_files(spec.model_copy(update={"adapter": lora_of(spec)}), {}, tmp_path)
    write_build(tmp_path / "build", compile_spec(spec).files)
    samples = RandomSamples(spec.model.vocab, SEQUENCE)
    trainer = Trainer(Build.open(tmp_path / "build"), 0, samples, samples, Board(1).bind(0))
    initial, _ = initial_weights(trainer.plan, tmp_path)
    assert initial is not None
    snapshot.put_untrained(trainer.state, initial.read, initial.shapes)
    shapes = {entry.name: entry.shape for _, entry in trainer.state.entries()}
    bounds = {n: e.abs().max().item() * n.endswith(A) for n, e in logical_of(trainer, "w", "parameters").items()}
    assert all(0 < bounds[f"w/{n}"] <= shape[-1] ** -0.5 for n, shape in shapes.items() if n.endswith(A))
    assert not any(tensor.any() for n, tensor in logical_of(trainer, "w", "parameters").items() if n.endswith(B))
    adapters = {name: tensor.requires_grad_() for name, tensor in random_adapters(shapes, torch.float64).items()}
    for bucket, entry in trainer.state.entries():
        bucket.set_weight(entry, adapters[entry.name].detach())

    theirs = with_wide_angles(theirs)
    settings = trainer.recipe.settings
    options = {"betas": (settings["beta1"], settings["beta2"]), "eps": settings["eps"], "weight_decay": DECAY}
    optimizer = torch.optim.AdamW(adapters.values(), lr=RATE, **options)
    for step in range(STEPS):
        sums = trainer.accumulate()
        data = trainer.batch.data
        tokens, targets = (data[name].reshape(BATCH, SEQUENCE).long() for name in ("tokens", "targets"))
        with Wide():
            logits = logits_of(theirs, adapters, tokens)
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            for name, ours in logical_of(trainer, "weight", "gradients").items():
                gradient = adapters[name.removeprefix("weight/")].grad
                assert gradient is not None and within(ours, gradient), name
                assert ours.any() or ".experts." in name, "gradients of zero would agree with anything"
        assert trainer.apply(sums)["loss"] == pytest.approx(loss.item(), rel=EXACT)
        optimizer.step()
    for name, ours in logical_of(trainer, "weight", "parameters").items():
        assert within(ours, adapters[name.removeprefix("weight/")].detach()), name
    for bucket in trainer.state.frozen:
        for entry in bucket.entries:
            value = initial.read([f"weight/{entry.name}"])[f"weight/{entry.name}"]
            assert torch.equal(bucket.parameters[entry.start : entry.end].view(entry.shape), value), entry.name


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_a_merged_export_equals_the_model_with_adapters(
    model_type: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs = random_model(model_type, torch.float32)
    theirs.save_pretrained(tmp_path / "hf")
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    spec = load_spec(tmp_path / "m.dsc")
    lora, base = lora_of(spec), load(tmp_path / "m.weights")
    extents = {name: shape for name, shape in base.shapes.items() if len(shape) == 2}
    adapted = {f"weight/layers.{n}.{path}" for n in range(3) for path in _paths()} & extents.keys()
    shapes = {f"{n}{A}": (RANK, extents[n][1]) for n in adapted} | {f"{n}{B}": (extents[n][0], RANK) for n in adapted}
    tensors = random_adapters(shapes, torch.float32)
    meta = {
        "plan": {"model": tree(recipe.model(spec.model)), "adapter": tree(recipe.adapter(lora))},
        BASE: base_entry(base.path, base.manifest, tmp_path / "run" / "checkpoints"),
    }
    publish.write(tmp_path / "run" / "checkpoints", 1, [tensors], meta)
    assert export(tmp_path / "run", tmp_path / "out", "--dtype", "fp32") == 0

    tokens = torch.arange(40).view(2, 20) * 7 % 300
    adapters = {name.removeprefix("weight/"): tensor for name, tensor in tensors.items()}
    with torch.no_grad():
        expected = logits_of(theirs, adapters, tokens)
        their_logits = loaded(tmp_path / "out")(input_ids=tokens, use_cache=False).logits
        base_logits = theirs(input_ids=tokens, use_cache=False).logits
    largest = expected.abs().max()
    assert (their_logits - expected).abs().max() <= 1e-5 * largest and (
        base_logits - expected
    ).abs().max() > 1e-2 * largest

    assert export(tmp_path / "run", tmp_path / "peft", "--dtype", "fp32", "--adapter") == 0
    with torch.no_grad(), _as_peft(theirs, tmp_path / "peft"):
        their_logits = theirs(input_ids=tokens, use_cache=False).logits
    assert (their_logits - expected).abs().max() <= 1e-5 * largest
    assert export(tmp_path / "m.weights", tmp_path / "peft2", "--adapter") == 2
    assert "it has no adapters: leave --adapter out" in capfd.readouterr().err

    text = (tmp_path / "m.dsc").read_text("utf-8")
    block = f"  adapter lora {{ rank = {RANK}, alpha = {ALPHA}, on = [{', '.join(lora.on)}] }}\n  train {{"
    (tmp_path / "a.dsc").write_text(text.replace("  train {", block, 1), "utf-8")
    source = find_source(str(tmp_path / "run" / "checkpoints"), str(tmp_path / "a.dsc"))
    ours = load_model(source, "fp32", average=False, progress=lambda _: None)
    logits = ours.logits(ours.hidden(tokens.flatten(), 20)).view(expected.shape)
    assert (logits - expected).abs().max() <= 1e-5 * largest

    (tmp_path / "m.weights").rename(tmp_path / "elsewhere")
    assert export(tmp_path / "run", tmp_path / "none", "--dtype", "fp32") == 2
    assert "has adapters, and their base checkpoint cannot be used" in capfd.readouterr().err
    changed = weights(tmp_path / "elsewhere")
    changed["weight/final_norm"] += 1
    publish.write(tmp_path / "m.weights", 0, [changed], base.meta)
    assert export(tmp_path / "run", tmp_path / "none", "--dtype", "fp32") == 2
    assert "m.weights/step-00000000 has other weights than theirs" in capfd.readouterr().err


def test_the_config_for_peft_describes_the_training() -> None:
    """There is no dropout, and B · A is multiplied by alpha / rank."""
    manifest = Manifest(1, 1, {"plan": {"adapter": {"factor": 0.5}}}, ())
    config = adapter_config(manifest, Adapters((), ("a", "b"), (), 8), "base")
    assert (config["r"], config["lora_alpha"], config["lora_dropout"], config["bias"]) == (8, 4.0, 0.0, "none")
    assert config["target_modules"] == ["a", "b"] and "target_parameters" not in config
    assert config["inference_mode"] and not config["fan_in_fan_out"] and config["base_model_name_or_path"] == "base"
    alone = adapter_config(manifest, Adapters((), (), ("p",), 8), None)
    assert alone["target_modules"] is None and alone["target_parameters"] == ["p"]


@contextmanager
def _as_peft(model: PreTrainedModel, folder: Path) -> Iterator[None]:
    """Their model with an adapter as PEFT reads it: `target_modules` get scale · B(A(x)) added, all files are used."""
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == str(folder.parent / "hf")
    assert config["peft_type"] == "LORA" and config["r"] == RANK and config["lora_alpha"] == ALPHA
    assert config["lora_dropout"] == 0 and config["bias"] == "none", "PEFT goes on training as it is trained here"
    tensors = load_file(folder / "adapter_model.safetensors")
    handles = []
    matrices = [
        name.removesuffix(".weight") for name in config.get("target_parameters", ()) if name.endswith(".weight")
    ]
    is_mixed = any("experts" in name for name in config.get("target_parameters", ()))
    assert not is_mixed or not any(name.endswith("_proj") and ".mlp." in name for name in config["target_modules"])
    for name in [*config["target_modules"], *matrices]:
        a, b = (tensors.pop(f"base_model.model.{name}.lora_{x}.weight") for x in "AB")

        def added(
            module: torch.nn.Module, inputs: tuple[Tensor], output: Tensor, a: Tensor = a, b: Tensor = b
        ) -> Tensor:
            return output + config["lora_alpha"] / config["r"] * (inputs[0] @ a.T) @ b.T

        handles.append(model.get_submodule(name).register_forward_hook(added))
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in {*config.get("target_parameters", ())} - {f"{matrix}.weight" for matrix in matrices}:
        _add_to_parameter(model, name, config["lora_alpha"] / config["r"], tensors)
    assert not tensors and len(handles) > 20
    yield
    model.load_state_dict(original)
    for handle in handles:
        handle.remove()


def _add_to_parameter(model: PreTrainedModel, name: str, scale: float, tensors: dict[str, Tensor]) -> None:
    """Add the delta of PEFT 0.21's `ParamWrapper` to the parameter of all experts of a layer, [experts, out, in]."""
    module, _, short = name.rpartition(".")
    first = next(iter(dict(model.get_submodule(module).named_parameters(recurse=False))))
    inside = ".base_layer" if short == first else ""
    a, b = (tensors.pop(f"base_model.model.{module}{inside}.lora_{x}.weight") for x in "AB")
    parameter = model.get_parameter(name)
    a_ERI, b_ORE = a.reshape(len(parameter), -1, a.shape[-1]), b.reshape(b.shape[0], -1, len(parameter))
    parameter += scale * torch.einsum("ore,eri->eoi", b_ORE, a_ERI)


def _paths() -> list[str]:
    return [path.replace("*", str(e)) for path in THERE for e in range(8)]


def test_a_run_saves_only_adapters_and_resumes(imported: Path) -> None:
    """In processes, as users run them."""
    Path("text.txt").write_text(TEXT, "utf-8")
    text = Path("m.dsc").read_text("utf-8")
    Path("m.dsc").write_text(text.replace("  train {", "  adapter lora { rank = 2, on = [qkv, down] }\n  train {", 1))
    settings = ("-s", 'data.source="text.txt"', "-s", "train.sequence=32", "-s", "data.validation=0")
    in_two = ("-s", "parallel.tensor=2", "-s", "cluster.node.devices=2")
    trained = dsc("train", "m.dsc", "--steps", "2", "--out", "run", *settings)
    assert trained.returncode == 0, trained.stderr
    assert "the weights begin with those of" in trained.stdout and "at random" not in trained.stdout
    after = weights(imported / "run" / "checkpoints")
    assert {name.partition("/")[0] for name in after} == {"weight", "moment1", "moment2"}
    assert all(name.endswith((A, B)) for name in after) and len(after) == 3 * 2 * 2 * 3
    assert all(tensor.any() for name, tensor in after.items() if name.startswith("weight/"))
    resumed = dsc("train", "m.dsc", "--steps", "3", "--out", "run", "--resume", *settings)
    assert resumed.returncode == 0, resumed.stderr
    uninterrupted = dsc("train", "m.dsc", "--steps", "3", "--out", "whole", *settings)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    ours, theirs = (weights(imported / run / "checkpoints") for run in ("run", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    split = dsc("train", "m.dsc", "--steps", "3", "--out", "split", *settings, *in_two)
    assert split.returncode == 0, split.stderr
    for name, tensor in weights(imported / "split" / "checkpoints").items():  # the same, but for the order of sums
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)
    louder = dsc("train", "m.dsc", "--steps", "4", "--out", "run", "--resume", *settings, "-s", "adapter.alpha=5")
    assert louder.returncode == 2 and "holds adapters for other weights: adapter.factor 1.0 → 2.5" in louder.stderr
    exported = dsc("export", "hf", "run", "-o", "out", "--dtype", "fp32")
    assert exported.returncode == 0, exported.stderr
    published, before = load_file("out/model.safetensors"), load_file("hf/model.safetensors")
    moved = {name for name, tensor in published.items() if not torch.equal(tensor, before[name])}
    assert moved == {n for n in before if any(part in n for part in ("q_proj", "k_proj", "v_proj", "down_proj"))}
    restarted = dsc("train", "m.dsc", "--steps", "1", "--out", "other", *settings, "-s", 'train.initial="run"')
    assert restarted.returncode == 2 and "has only adapters, without the weights of the model" in restarted.stderr


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/cache/hub/models--Qwen--Qwen3-8B/snapshots/9c925d64", "Qwen/Qwen3-8B"),
        ("/cache/hub/models--gpt2/snapshots/607a30d7", "gpt2"),
        ("/models/Qwen3-8B", "/models/Qwen3-8B"),
    ],
)
def test_an_import_keeps_the_published_name(folder: str, name: str) -> None:
    model = load_spec(Path(__file__).parents[4] / "specs" / "tiny.dsc").model
    meta = imported_meta(model, "llama", 64, Path(folder))
    assert published_name(Manifest(step=0, serial=0, shards=(), meta=meta)) == name
    assert published_name(Manifest(step=0, serial=0, shards=(), meta={})) is None, "of weights that were trained here"
