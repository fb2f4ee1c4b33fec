"""`dsc export torchtitan` and `dsc export megatron-bridge`: the exported settings, by the released packages' names."""

from __future__ import annotations

import ast
import errno
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compiler.cli.main import main
from compiler.tools.exporters import megatron_bridge, torchtitan
from compiler.tools.exporters.planned import (
    ExportError,
    PythonCall,
    SpecLedger,
    free_name,
    layers_of,
    optimizer_to_export,
    render_python,
    to_printable_ascii,
)
from dsl.leaves import leaves
from dsl.load import load as load_spec
from dsl.schema.precision import Tile
from dsl.schema.rotation import LinearScaling, YarnScaling
from tests import copies
from tests.compiler.cli.forms import parsed
from tests.compiler.tools.exchange.stubs import FIELDS, Recorded, calls, load, standing_in

ROOT = Path(__file__).parents[4]
V3 = str(ROOT / "specs" / "deepseek-v3.dsc")
BENCH = str(ROOT / "specs" / "bench-4.dsc")
TITAN, BRIDGE = FIELDS["torchtitan 0.3.0"], FIELDS["megatron-bridge 0.3.1, megatron-core 0.16.1"]
Capture = pytest.CaptureFixture[str]


def exported(out: Path, system: str, spec: str, *options: str) -> Path:
    assert main(["export", system, spec, "-o", str(out), *options]) == 0
    return out


def stages_of(layout: str, ranks: int) -> list[list[str]]:
    """The layers of each stage, by Megatron-Core's rules for a layout: repeated groups first, then repeated letters;
    as many stages as the ranks divide; E and L once, at the ends."""
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda repeat: repeat[1] * int(repeat[2]), text)
    stages = [list(stage) for stage in text.split("|")]
    flat = [letter for stage in stages for letter in stage]
    assert len(stages) % ranks == 0 and {*flat} <= set("EtmL")
    assert (flat[0], flat[-1], flat.count("E"), flat.count("L")) == ("E", "L", 1, 1)
    assert "m" not in flat or "t" not in flat[flat.index("m") :]
    return stages


# ---------------------------------------------------------------- torchtitan


def test_exports_use_the_names_of_torchtitan(tmp_path: Path) -> None:
    folder = exported(tmp_path / "out", "torchtitan", V3, "-s", "schedule.name=dualpipev", "--lossy")
    with standing_in("torchtitan"):
        module = load(folder / "config_registry.py")
        config = module.pretrain()
    arguments = {}
    for call in calls([config, module.model_spec()]):
        if call._name in TITAN:
            assert {*call._arguments} <= {*TITAN[call._name], "0"}, call._name
            arguments[call._name] = call._arguments
    training, parallel = arguments["TrainingConfig"], arguments["ParallelismConfig"]
    assert (training["seq_len"], training["global_batch_size"], training["local_batch_size"]) == (4096, 15360, 120)
    assert parallel["pipeline_parallel_schedule_csv"] == str(folder / "schedule.csv")
    assert parallel["pipeline_parallel_schedule"] == "DualPipeV"  # which places stages as a V
    names = [name for stage in parallel["module_fqns_per_model_part"] for name in stage]
    assert names == ["tok_embeddings", *(f"layers.{index}" for index in range(61)), "norm", "lm_head"]
    assert arguments["Trainer.Config"]["model_spec"]._name == "ModelSpec"


def rate_of_torchtitan(config: dict[str, Any], step: int) -> float:
    """The factor of the rate at a step, from 0, as torchtitan 0.3.0 computes it."""
    import math

    total, warmup = config["total_steps"], config["warmup_steps"]
    decay = min(round(total * config["decay_ratio"]), total - warmup)
    stable = total + 1 - warmup - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < warmup + stable:
        return 1.0
    progress = (step + 1 - warmup - stable) / decay
    falls = 0.5 * (1 + math.cos(math.pi * progress)) if config["decay_type"] == "cosine" else 1 - progress
    least: float = config["min_lr_factor"]
    return least + (1 - least) * falls


@pytest.mark.parametrize(
    ("rate", "peak"),
    [
        ("constant at 1e-3", 1e-3),
        ("warmup 20 steps to 1e-3, constant", 1e-3),
        ("warmup 20 steps to 1e-3, constant until 100 steps, cosine to 1e-4", 1e-3),
        ("warmup 30 steps to 2e-3, constant until 31 steps, linear to 0", 2e-3),
    ],
)
def test_exported_rates_equal_those_of_a_run(rate: str, peak: float, tmp_path: Path) -> None:
    from runtime.contract.rate import learning_rate

    options = ["-s", f"train.rate={rate}"]
    folder = exported(tmp_path / "out", "torchtitan", BENCH, *options)
    with standing_in("torchtitan"):
        config = load(folder / "config_registry.py").bench_4()
    scheduler = next(c._arguments for c in calls(config) if c._name == "LRSchedulersContainer.Config")
    spec = load_spec(BENCH, overrides=[options[1]])
    tokens = spec.train.batch.end * spec.train.sequence
    for step in range(200):
        expected = learning_rate(spec.train.rate, (step + 1) * tokens)  # type: ignore[arg-type]
        assert peak * rate_of_torchtitan(scheduler, step) == pytest.approx(expected, rel=1e-9, abs=1e-15), step


# ---------------------------------------------------------------- Megatron-Bridge


def test_exports_use_the_names_of_megatron_bridge(tmp_path: Path) -> None:
    folder = exported(tmp_path / "out", "megatron-bridge", V3, "--lossy")
    with standing_in("megatron"):
        config = load(folder / "recipe.py").pretrain()
    model = config.model._arguments
    assert {*model} <= {*BRIDGE["MLAModelProvider"]}
    assert {*config.mixed_precision._arguments} <= {*BRIDGE["MixedPrecisionConfig"]}
    for part in ("train", "optimizer", "scheduler", "ddp", "rng", "dataset", "checkpoint"):
        assert {*config._set[part]._set} <= {*BRIDGE[part]}, part
    assert (model["num_layers"], model["hidden_size"], model["num_moe_experts"]) == (61, 7168, 256)
    assert model["moe_layer_freq"] == [0] * 3 + [1] * 58
    layout = (folder / "layout.txt").read_text().strip()
    assert model["pipeline_model_parallel_layout"] == layout
    stages = stages_of(layout, 16)
    assert len(stages) == 16 and sum(stage.count("t") for stage in stages) == 61 and stages[-1][-2:] == ["m", "L"]


def test_interleaved_stages_are_virtual_stages_of_megatron(tmp_path: Path) -> None:
    options = ["-s", "schedule.name=interleaved", "-s", "schedule.chunks=2", "--lossy"]
    folder = exported(tmp_path / "out", "megatron-bridge", V3, *options)
    with standing_in("megatron"):
        model = load(folder / "recipe.py").pretrain().model._arguments
    assert model["virtual_pipeline_model_parallel_size"] == 2
    assert len(stages_of(model["pipeline_model_parallel_layout"], 16)) == 32


@pytest.mark.parametrize(
    ("overrides", "said", "lost"),
    [
        ((), {}, []),
        (("recompute=[layer]",), {"granularity": "full", "method": "uniform", "num_layers": 1}, []),
        (("recompute=[layer]", "recompute_layers=2"), {"granularity": "full", "method": "block", "num_layers": 2}, []),
        (("recompute=[rmsnorm, swiglu]",), {"granularity": "selective", "modules": ["layernorm", "moe_act"]}, []),
        (("recompute=[rmsnorm, router]",), {"granularity": "selective", "modules": ["layernorm"]}, ["recompute"]),
        (("recompute=[router]",), {}, ["recompute"]),
    ],
)
def test_exported_recomputation_for_megatron(overrides: tuple[str, ...], said: dict[str, Any], lost: list[str]) -> None:
    spec = load_spec(BENCH, overrides=["recompute=[]", *overrides])
    ledger = SpecLedger(spec)
    assert megatron_bridge._recompute(spec, ledger) == {f"recompute_{key}": value for key, value in said.items()}
    assert [loss.path for loss in ledger.losses("Megatron") if loss.path.startswith("recompute")] == lost


@pytest.mark.parametrize(
    ("overrides", "said", "lost"),
    [
        ((), None, []),
        (("recompute=[layer]",), "FullAC.Config", []),
        (("recompute=[layer]", "recompute_layers=2"), "SelectiveAC.Config", ["recompute", "recompute_layers"]),
        (("recompute=[rmsnorm, swiglu]",), "SelectiveAC.Config", ["recompute"]),
    ],
)
def test_exported_recomputation_for_torchtitan(overrides: tuple[str, ...], said: str | None, lost: list[str]) -> None:
    spec = load_spec(BENCH, overrides=["recompute=[]", *overrides])
    ledger = SpecLedger(spec)
    recomputation = torchtitan._recompute(spec, ledger)
    assert (recomputation and recomputation.function) == said
    losses = [loss for loss in ledger.losses("it") if loss.path.startswith("recompute")]
    assert [loss.path for loss in losses] == lost and not any(loss.changes for loss in losses)


@pytest.mark.parametrize(
    ("changed", "is_said"),
    [
        ({}, True),
        ({"weight_tile": Tile(rows=1, columns=128)}, False),
        ({"hadamard": True}, False),
        ({"scale": "pow2"}, False),
    ],
)
def test_fp8_blocks_are_exported_if_megatron_has_the_same_ones(changed: dict[str, Any], is_said: bool) -> None:
    spec = load_spec(V3)
    precision = spec.precision.model_copy(update={"scale": "fp32", **changed})
    spec = spec.model_copy(update={"precision": precision})
    ledger = SpecLedger(spec)
    settings, _ = megatron_bridge._precision(spec, ledger)
    assert (settings.get("fp8"), settings.get("fp8_recipe")) == (("e4m3", "blockwise") if is_said else (None, None))
    assert ("precision.linear" in {loss.path for loss in ledger.losses("Megatron")}) != is_said


def test_layers_must_be_dense_first_and_then_moe(tmp_path: Path) -> None:
    tiny = (ROOT / "specs" / "tiny.dsc").read_text("utf-8")
    layers = layers_of(load_spec(ROOT / "specs" / "tiny.dsc"), "it")
    assert (layers.dense, layers.total) == (1, 2)
    assert layers.dense_ffn is not None and layers.dense_ffn.inner == 32 and layers.moe is not None
    dense = "  layers 0..0 { ffn dense { inner = 32 } }\n"
    (tmp_path / "all.dsc").write_text(tiny.replace(dense, "").replace("layers 1..1", "layers 0..1"), "utf-8")
    layers = layers_of(load_spec(tmp_path / "all.dsc"), "it")
    assert (layers.dense, layers.total, layers.dense_ffn) == (0, 2, None) and layers.moe is not None
    two_dense = dense + dense.replace("0..0", "1..1").replace("32", "64")
    (tmp_path / "two.dsc").write_text(
        tiny.replace(dense, two_dense).replace("layers 1..1 {\n", "layers 2..2 {\n"), "utf-8"
    )
    with pytest.raises(ExportError, match="it has one kind of dense layer"):
        layers_of(load_spec(tmp_path / "two.dsc"), "it")


def test_a_custom_optimizer_is_refused() -> None:
    spec = load_spec(ROOT / "specs" / "tiny.dsc")
    row = SimpleNamespace(kind="lion", settings=dict)
    custom = SimpleNamespace(train=SimpleNamespace(optimizer=SimpleNamespace(rows=(row,))))
    with pytest.raises(ExportError, match="optimizer lion cannot be exported to Megatron"):
        optimizer_to_export(custom, SpecLedger(spec), "Megatron")  # type: ignore[arg-type]


# ---------------------------------------------------------------- losses


def test_a_plan_that_becomes_another_is_refused(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "out"
    assert main(["export", "megatron-bridge", V3, "-o", str(folder), "--format", "json"]) == 2
    printed = capsys.readouterr()
    document = parsed(printed.out, "export")
    assert document["folder"] is None and not folder.exists()
    changed = {loss["path"] for loss in document["losses"] if loss["changes"]}
    assert {"schedule.name", "train.rate", "precision.dispatch", "train.batch"} <= changed
    assert "--lossy" in printed.err
    assert main(["export", "megatron-bridge", V3, "-o", str(folder), "--format", "json", "--lossy"]) == 0
    document = parsed(capsys.readouterr().out, "export")
    text = (folder / "recipe.py").read_text()
    for loss in document["losses"]:  # all that is lost is in the file too
        assert to_printable_ascii(f"{loss['path']} = {loss['value']}: {loss['why']}") in text


@pytest.mark.parametrize(
    ("system", "more"), [("torchtitan", {"parallel.zero", "parallel.overlap_reduce"}), ("megatron-bridge", set())]
)
def test_supported_values_are_not_losses(system: str, more: set[str], tmp_path: Path, capsys: Capture) -> None:
    """The other system supports everything in this spec except its data."""
    assert main(["export", system, BENCH, "-o", str(tmp_path / "out"), "--format", "json"]) == 0
    losses = parsed(capsys.readouterr().out, "export")["losses"]
    data = {"data.source", "data.tokenizer", "data.validation", "data.documents"}
    assert {loss["path"] for loss in losses} == data | more and not any(loss["changes"] for loss in losses)


@pytest.mark.parametrize("system", ["torchtitan", "megatron-bridge"])
def test_how_checkpoints_are_kept_is_a_loss_that_changes_no_training(
    system: str, tmp_path: Path, capsys: Capture
) -> None:
    checkpoint = "train.checkpoint { every = 5 steps, keep = 2, keep_every = 10 steps }"
    assert main(["export", system, BENCH, "-s", checkpoint, "-o", str(tmp_path / "out"), "--format", "json"]) == 0
    losses = parsed(capsys.readouterr().out, "export")["losses"]
    lost = [loss for loss in losses if loss["path"].startswith("train.checkpoint.")]
    assert "train.checkpoint.keep_every" in {loss["path"] for loss in lost}
    assert not any(loss["changes"] or "no word for it" in loss["why"] for loss in lost)


YARN = YarnScaling(factor=4, original=64)


@pytest.mark.parametrize(
    ("scaling", "titan", "megatron"),
    [
        (None, None, None),
        (LinearScaling(factor=4), "supports only YaRN", "supports only YaRN"),
        (YARN, "does not scale the sines", None),
        (YARN.model_copy(update={"attention_factor": 1.0}), None, "Megatron scales the sines"),
        (YARN.model_copy(update={"mscale": 0.7, "mscale_all_dim": 0.7}), None, None),
        (YARN.model_copy(update={"mscale": 0.7, "mscale_all_dim": 1.0}), "does not scale the sines", None),
        (YARN.model_copy(update={"mscale_all_dim": 0.7}), "does not scale the sines", "Megatron scales the sines"),
        (YARN.model_copy(update={"truncate": False}), "does not scale the sines", "its ramp ends at whole pairs"),
    ],
)
def test_a_scaled_rotation_is_lost_where_the_other_has_another(
    scaling: LinearScaling | YarnScaling | None, titan: str | None, megatron: str | None
) -> None:
    spec = load_spec(BENCH)
    rope = spec.model.attention.rope.model_copy(update={"scaling": scaling})  # type: ignore[union-attr]
    attention = spec.model.attention.model_copy(update={"rope": rope})
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"attention": attention})})
    for wanted, export in (
        (titan, lambda ledger: torchtitan._rope(spec, rope, ledger)),
        (megatron, lambda ledger: megatron_bridge._rope(rope, ledger)),
    ):
        ledger = SpecLedger(spec)
        export(ledger)
        lost = [loss for loss in ledger.losses("it") if loss.path.startswith("model.attention.rope.")]
        assert bool(lost) == (wanted is not None)
        assert all(loss.changes and wanted is not None and wanted in loss.why for loss in lost)


@pytest.mark.parametrize("system", ["torchtitan", "megatron-bridge"])
def test_every_value_of_a_spec_is_exported_or_listed_as_lost(system: str, capsys: Capture) -> None:
    """A value unknown to the exporters, such as a new key, counts as lost and as a change."""
    spec = load_spec(BENCH)
    ledger = SpecLedger(spec)
    assert {loss.path for loss in ledger.losses(system)} == {leaf.path for leaf in leaves(spec)}
    ledger.say("model.*", "train.*")
    losses = ledger.losses(system)
    assert losses and all(not loss.path.startswith(("model.", "train.")) for loss in losses)
    assert all(loss.changes for loss in losses if loss.path.startswith(("precision", "parallel")))


@pytest.mark.parametrize("system", ["torchtitan", "megatron-bridge"])
def test_models_that_the_other_system_lacks_are_refused(system: str, tmp_path: Path, capsys: Capture) -> None:
    of_latents = [(name, "latent attention") for name in ("llama3-8b", "qwen3-30b-a3b")]
    for name, why in (*of_latents, ("laptop-v32", "small_v32 has an indexer")):
        assert main(["export", system, str(ROOT / "specs" / f"{name}.dsc"), "-o", str(tmp_path / "out")]) == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- hostile


def test_spec_text_never_becomes_code(tmp_path: Path) -> None:
    copies.copy(BENCH, tmp_path / "bench-4.dsc")
    spec = tmp_path / "odd.dsc"
    source = '\\"\\"\\"\\\\n__import__(\'os\')'
    spec.write_text(f'import "bench-4.dsc"\nrun partial extends bench_4 {{ data {{ source = "{source}" }} }}\n')
    for system, file in (("torchtitan", "config_registry.py"), ("megatron-bridge", "recipe.py")):
        folder = tmp_path / system
        code = main(["export", system, f"{spec}:partial", "-o", str(folder), "--lossy"])
        if code:  # the language may refuse such a path itself
            continue
        tree = ast.parse((folder / file).read_text())
        assert not any(isinstance(node, ast.Name) and node.id == "__import__" for node in ast.walk(tree))
        assert "partial_" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_values_are_written_as_literals() -> None:
    assert render_python({"a": [1, 2.5, None, True, "it's\n"]}) == "{'a': [1, 2.5, None, True, \"it's\\n\"]}"
    assert render_python(("x",)) == "('x',)" and render_python(PythonCall("f", {"a": 1})) == "f(a=1)"
    long = render_python(("x" * 90,))
    assert ast.literal_eval(long) == ("x" * 90,)
    for value in (float("inf"), float("nan"), object(), {1}, b"x"):
        with pytest.raises(TypeError):
            render_python(value)
    assert free_name("class", "") == "class_" and free_name("print", "") == "print_" and free_name("x", "x x_") == "x__"
    for name in ("a b", "1", "é", "a.b", ""):
        with pytest.raises(ValueError):
            free_name(name, "")


@pytest.mark.parametrize("system", ["torchtitan", "megatron-bridge"])
def test_folders_that_cannot_be_written(system: str, tmp_path: Path, capsys: Capture) -> None:
    file, full = tmp_path / "file", tmp_path / "full"
    file.write_text("mine")
    full.mkdir()
    (full / "mine").write_text("mine")
    for output in (file, full, file / "below"):
        assert main(["export", system, BENCH, "-o", str(output), "--lossy"]) == 2
        assert "error: " in capsys.readouterr().err
    assert file.read_text() == "mine" and [p.name for p in full.iterdir()] == ["mine"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full"]


def test_a_full_disk_leaves_no_folder(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_bytes(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(Path, "write_bytes", write_bytes)
        assert main(["export", "torchtitan", BENCH, "-o", str(tmp_path / "out")]) == 75
    assert f"error: {tmp_path / 'out'} cannot be written: No space left on device\n" in capsys.readouterr().err
    assert main(["export", "torchtitan", BENCH, "-o", str(tmp_path / "a\0b")]) == 2
    assert "cannot be written: the path is not valid" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_options_of_the_other_kind(tmp_path: Path, capsys: Capture) -> None:
    assert main(["export", "torchtitan", BENCH, "-o", str(tmp_path / "x"), "--dtype", "fp8"]) == 2
    assert "--dtype is an option of hf" in capsys.readouterr().err
    assert main(["export", "hf", "run", "-o", str(tmp_path / "x"), "--lossy"]) == 2
    assert json.dumps("--lossy")[1:-1] in capsys.readouterr().err


def test_stand_ins_record() -> None:
    value = Recorded("f")(a=Recorded("g")(b=1))
    assert [call._name for call in calls(value)] == ["f", "g"]
