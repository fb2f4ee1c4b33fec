"""`dsc import megatron-bridge`: round trips of exports, and a ledger entry for every key."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from compiler.cli.commands.export_plan import _plan_to_export
from compiler.cli.commands.schedule_spec import run_of
from compiler.cli.main import main
from compiler.tools.exporters import megatron_bridge
from compiler.tools.exporters.planned import LostValue
from compiler.tools.importers.key_files import yaml_keys
from compiler.tools.importers.megatron import CONFIG, import_keys, keys_of_recipe
from compiler.tools.importers.plan_ledger import ImportedPlan
from compiler.tools.importers.python_calls import NotLiteralError, list_of, read_returned_call
from compiler.tools.importers.shell_words import script
from dsl.leaves import leaves
from dsl.load import load
from dsl.messages.diagnostics import Source, SpecError
from dsl.schema import Spec
from dsl.text.formatter import format_source
from tests.compiler.cli.forms import parsed

ROOT = Path(__file__).parents[4]
BENCH = str(ROOT / "specs" / "bench-4.dsc")
QUICK = str(ROOT / "specs" / "quickstart.dsc")
Capture = pytest.CaptureFixture[str]
# Keys that a recipe leaves to the launcher and the data, names, and keys that follow from an explicit layout.
ELSEWHERE = ("cluster*", "data*", "name", "model", "precision", "parallel.layout", "sm*", "unfused", "offload")
SCRIPT = """\
#!/bin/bash
TP=1
PP=${PP:-2}
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4
    --kv-channels 32 --seq-length 256 # tokens
    --rotary-base 10000 --norm-epsilon 1e-6 --swiglu --untie-embeddings-and-output-weights
    --multi-latent-attention --q-lora-rank 128 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16
    --v-head-dim 32 --qk-layernorm --position-embedding-type rope
    --normalization RMSNorm --disable-bias-linear --hidden-dropout 0.0 --attention-dropout 0
    --num-experts 16 --moe-layer-freq '([0]*1+[1]*3)' --moe-ffn-hidden-size 128 --moe-router-topk 4
    --moe-shared-expert-intermediate-size 128 --moe-router-num-groups 4 --moe-router-group-topk 2
    --moe-router-dtype fp32 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
)
torchrun pretrain_gpt.py ${MODEL_ARGS[@]} \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} --use-distributed-optimizer \\
    --overlap-grad-reduce --micro-batch-size=4 --global-batch-size 8 --train-iters 200 --lr 1e-3 --min-lr 1e-4 \\
    --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95 --seed 1 --bf16 \\
    --vocab-size 4096 --log-interval 1 --some-new-option 3 --data-path $DATA
"""


def read_back(text: str) -> Spec:
    """The spec of a text; asserts that nothing is wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imported.dsc"
        path.write_text(text)
        return load(path)


def of_recipe(text: str, devices: int | None = 2) -> ImportedPlan:
    """The import of a recipe in which nothing is computed."""
    name, members, computed = read_returned_call(Source("recipe.py", text), CONFIG, None)
    assert not computed
    return import_keys(keys_of_recipe(members), name, devices, None)


def of_script(text: str, devices: int | None = 2) -> ImportedPlan:
    return import_keys(script(Source("pretrain.sh", text), {"DATA": "a"})[0], "mine", devices, None)


@st.composite
def overrides(draw: st.DrawFn) -> tuple[str, list[str]]:
    """An exportable spec, and overrides of it."""
    given_of = {
        "train.sequence": st.sampled_from([64, 128, 512]),
        "train.steps": st.integers(40, 10**6),
        "train.seed": st.integers(0, 2**31),
        "train.optimizer.beta1": st.sampled_from([0.8, 0.9]),
        "train.optimizer.eps": st.sampled_from([1e-8, 1e-15]),
        "train.optimizer.clip": st.sampled_from(["none", 0.5, 2]),
        "train.optimizer.weight_decay": st.sampled_from([0, 0.01, 0.1]),
        "train.rate": st.sampled_from(
            ["constant at 1e-3", "warmup 20 steps to 2e-3, constant", "warmup 9 steps to 1e-3, cosine to 1e-4",
             "warmup 5 steps to 1e-3, constant until 30 steps, linear to 0"]
        ),
        "model.init_std": st.sampled_from([0.006, 0.02]),
        "model.norm_eps": st.sampled_from([1e-5, 1e-6]),
        "model.hidden": st.sampled_from([128, 320]),
        "model.attention.query_rank": st.sampled_from(["none", 96]),
        "model.attention.head_dim.value": st.sampled_from([16, 48]),
        "model.attention.rope.theta": st.sampled_from([5000, 1_000_000]),
        "recompute": st.sampled_from(["[]", "[layer]", "[rmsnorm, swiglu]"]),
        "precision": st.sampled_from(["bf16", "fp32"]),
        "parallel.zero": st.sampled_from([0, 1]),
        "parallel.overlap_reduce": st.sampled_from(["true", "false"]),
    }  # fmt: skip
    chosen = draw(st.sets(st.sampled_from(sorted(given_of)), max_size=8))
    values = [f"{key}={draw(given_of[key])}" for key in sorted(chosen)]
    spec = draw(st.sampled_from([BENCH, QUICK]))
    return spec, [*values, *(["schedule.name=1f1b"] if spec == QUICK else [])]


@settings(max_examples=20, derandomize=True, deadline=None)
@given(overrides())
def test_exports_import_as_the_same_spec(case: tuple[str, list[str]]) -> None:
    path, changes = case
    try:
        spec = load(path, overrides=changes)
    except SpecError:  # the values do not fit together
        reject()
    exported = megatron_bridge.export(_plan_to_export(run_of(spec)))
    plan = of_recipe(exported.files["recipe.py"].decode(), spec.cluster.world)
    assert_comes_back(spec, plan, exported.losses, ELSEWHERE)


def assert_comes_back(spec: Spec, found: ImportedPlan, losses: Sequence[LostValue], elsewhere: Sequence[str]) -> Spec:
    """The leaves of a spec imported from an export of `spec`, without lost keys and those written `elsewhere`
    (patterns)."""
    assert not found.mistakes
    assert not [e for e in found.ledger if e.kind in ("unknown", "not expressible", "approximated")]
    reimported = read_back(found.text)
    assert reimported.name == spec.name
    before, after = ({leaf.path: leaf.text for leaf in leaves(version)} for version in (spec, reimported))
    lost = [*elsewhere, *(loss.path for loss in losses), *(f"{loss.path}.*" for loss in losses)]
    differ = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    differ = {key for key in differ if not any(fnmatchcase(key, pattern) for pattern in lost)}
    assert not differ, {key: (before.get(key), after.get(key)) for key in differ}
    return reimported


def test_every_argument_of_a_script_is_in_the_ledger() -> None:
    members, computed = script(Source("pretrain.sh", SCRIPT), {})
    written = {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", SCRIPT)}
    assert [item.code for item in computed] == ["I0104"] and "$DATA" in computed[0].message
    plan = import_keys(members, "mine", 2, None)
    assert not plan.mistakes
    entries = {entry.key: entry for entry in plan.ledger}
    assert written <= entries.keys()
    assert {key for key in written & entries.keys() if entries[key].kind == "unknown"} == {"some_new_option"}
    place = entries["num_experts"].place
    assert place is not None and place.text == "--num-experts"
    reimported, bench = read_back(plan.text), load(BENCH)
    assert reimported.model.layers == bench.model.layers
    assert reimported.model.attention == bench.model.attention
    assert (reimported.parallel.pipeline, reimported.parallel.zero, reimported.train.batch.end) == (2, 1, 8)
    assert reimported.precision.compute == "bf16"
    for entry in plan.ledger:
        assert entry.key in plan.text


def test_yaml_and_script_import_equally() -> None:
    members, _ = script(Source("pretrain.sh", SCRIPT), {"PP": "1", "DATA": "a"})
    lines = "".join(
        f"  --{name.replace('_', '-')}: {json.dumps(value.value)}\n"
        for name, values in members.items()
        for value in values
    )
    of_yaml, computed = yaml_keys(Source("args.yaml", f"ENV_VARS: {{}}\nMODEL_ARGS:\n{lines}"), {})
    assert not computed
    script_plan, yaml_plan = import_keys(members, "mine", 2, None), import_keys(of_yaml, "mine", 2, None)
    assert read_back(script_plan.text) == read_back(yaml_plan.text)
    assert [str(entry) for entry in script_plan.ledger] == [str(entry) for entry in yaml_plan.ledger]


def test_nothing_is_executed(tmp_path: Path, capsys: Capture) -> None:
    recipe, mark = tmp_path / "recipe.py", tmp_path / "mark"
    recipe.write_text(
        f"open({str(mark)!r}, 'w')\ndef run():\n    cfg.model = MLAModelProvider(\n"
        f"        num_layers=[open({str(mark)!r}, 'w')][0],\n        hidden_size=64)\n    return cfg\n"
    )
    assert main(["import", "megatron-bridge", str(recipe), "--vocab", "100"]) == 2
    printed = capsys.readouterr().err
    assert not mark.exists()
    assert "I0104" in printed and f"{recipe}:4:20" in printed and "`num_layers` is unknown" in printed
    for text in ("f(1)[0]", "1 if x else 2", "[0] * 10**9", "x +"):
        with pytest.raises(NotLiteralError):
            list_of(text)


def test_the_command(tmp_path: Path, capsys: Capture) -> None:
    file, spec_file = tmp_path / "pretrain.sh", tmp_path / "mine.dsc"
    file.write_text(SCRIPT.replace("--adam-beta2", "--moe-z-loss-coeff 1e-3 --adam-beta2"))
    command = ["import", "megatron-bridge", str(file), "--devices", "2", "-D", "PP=1", "-o", str(spec_file)]
    assert main([*command, "--format", "json"]) == 2
    document = parsed(capsys.readouterr().out, "import")
    assert document["spec"] is None and not spec_file.exists()
    assert [entry["key"] for entry in document["keys"] if entry["kind"] == "not expressible"] == ["moe_z_loss_coeff"]
    assert main([*command, "--format", "json", "--lossy"]) == 0
    assert parsed(capsys.readouterr().out, "import")["spec"] == spec_file.read_text()
    assert load(str(spec_file)).parallel.pipeline == 1
    assert main(["fmt", "--check", str(spec_file)]) == 0
    assert main(["import", "hf", str(file), "--vocab", "3"]) == 2
    for name, text in (("bad.py", "def f(:\n"), ("bad.yaml", "a: [1\n")):
        (tmp_path / name).write_text(text)
        assert main(["import", "megatron-bridge", str(tmp_path / name)]) == 2
        assert "I0103" in capsys.readouterr().err


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_value_gives_a_spec_or_a_message(data: st.DataObject) -> None:
    """An import returns a text and a ledger for any values in a script."""
    names = re.findall(r"--([\w-]+)", SCRIPT)
    odd_values = [
        "0",
        "-1",
        "1e400",
        "nan",
        "9" * 5000,
        "true",
        "none",
        "x }",
        '"',
        "[0]*10**9",
        "[[1]]",
        "1e15",
        "0.5",
        "",
    ]
    words = data.draw(st.lists(st.tuples(st.sampled_from(names), st.sampled_from(odd_values)), min_size=1, max_size=4))
    members, _ = script(Source("pretrain.sh", SCRIPT), {"DATA": "a"})
    changed, _ = script(Source("odd.sh", "\n".join(f"--{name} {shlex.quote(value)}" for name, value in words)), {})
    plan = import_keys({**members, **changed}, "mine", data.draw(st.sampled_from([None, 8])), None)
    assert {*members, *changed} <= {entry.key for entry in plan.ledger} or plan.mistakes
    format_source(Source("mine.dsc", plan.text))
