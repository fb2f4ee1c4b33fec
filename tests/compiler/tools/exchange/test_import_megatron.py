"""`dsc import megatron-bridge`: Megatron's defaults for absent keys, and alternative spellings of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.tools.importers.plan_ledger import ImportedPlan, LedgerEntry
from dsl.schema import Gqa
from tests.compiler.tools.exchange.test_import_plans import SCRIPT, of_recipe, of_script, read_back

Capture = pytest.CaptureFixture[str]
OFF = {  # argument → the key under which its absence is reported
    "--normalization RMSNorm": "normalization", "--swiglu": "swiglu", "--disable-bias-linear": "add_bias_linear",
    "--hidden-dropout 0.0": "hidden_dropout", "--attention-dropout 0": "attention_dropout",
    "--position-embedding-type rope": "position_embedding_type", "--moe-router-dtype fp32": "moe_router_dtype",
    "--qk-layernorm": "qk_layernorm",
}  # fmt: skip
RECIPE = """\
from megatron.bridge.training.config import ConfigContainer
def mine() -> ConfigContainer:
    model = MLAModelProvider(
        num_layers=4, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4, vocab_size=512,
        gated_linear_unit=True, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        position_embedding_type="rope", qk_layernorm=True,
    )
    cfg = ConfigContainer(
        model=model,
        train=TrainingConfig(global_batch_size=8, train_iters=100),
        dataset=GPTDatasetConfig(sequence_length=256),
        optimizer=OptimizerConfig(lr=1e-3),
    )
    return cfg
"""


def changes(found: ImportedPlan) -> dict[str, LedgerEntry]:
    return {entry.key: entry for entry in found.ledger if entry.kind in ("not expressible", "approximated", "computed")}


@pytest.mark.parametrize("argument", OFF)
def test_a_default_that_no_model_has_here_is_in_the_ledger(argument: str) -> None:
    assert argument in SCRIPT and not changes(of_script(SCRIPT))
    plan = of_script(SCRIPT.replace(argument, ""))
    assert {key: entry.kind for key, entry in changes(plan).items()} == {OFF[argument]: "not expressible"}
    assert "Megatron's default" in changes(plan)[OFF[argument]].why


def test_a_recipe_is_read_through_its_names() -> None:
    """An MLAModelProvider has RMSNorm by default, and another class the defaults of Megatron."""
    plan = of_recipe(RECIPE)
    assert not plan.mistakes and not changes(plan)
    assert not [entry for entry in plan.ledger if entry.kind == "unknown"]
    spec = read_back(plan.text)
    assert (spec.name, spec.model.hidden, spec.train.batch.end, spec.model.attention.kind) == ("mine", 256, 8, "mla")
    assert {*changes(of_recipe(RECIPE.replace("MLA", "GPT")))} == {"normalization"}
    assert {*changes(of_recipe(RECIPE.replace("MLAM", "OtherM")))} == {"normalization", "config.model"}
    assert {*changes(of_recipe(RECIPE.replace("OptimizerC", "MuonC")))} == {"config.optimizer"}


@pytest.mark.parametrize(
    ("written", "compute", "lost"),
    [
        ('"bf16_mixed"', "bf16", ()),
        ('"bf16-mixed"', "bf16", ()),
        ("bf16_mixed()", "bf16", ()),
        ("MixedPrecisionConfig(bf16=True)", "bf16", ()),
        ("MixedPrecisionConfig(fp32=True)", "fp32", ()),
        ("None", "fp32", ()),
        ('"fp16_mixed"', "fp32", ("fp16",)),
        ('"bf16_with_fp8_current_scaling_mixed"', "bf16", ("fp8",)),
        ('"bf16_with_mxfp8_mixed"', "bf16", ("fp8",)),
        ('"mine_mixed"', "fp32", ("mixed_precision",)),
        ("mine(3)", "fp32", ("mixed_precision",)),
    ],
)
def test_a_precision_may_have_a_name(written: str, compute: str, lost: tuple[str, ...]) -> None:
    for text in (
        RECIPE.replace("return cfg", f"cfg.mixed_precision = {written}\n    return cfg"),
        RECIPE.replace("model=model", f"model=model, mixed_precision={written}"),
    ):
        plan = of_recipe(text)
        assert not plan.mistakes and {*changes(plan)} == {*lost}
        assert read_back(plan.text).precision.compute == compute
        assert "mixed_precision" in {entry.key for entry in plan.ledger}


def test_conditional_statements_are_assumed_to_run_and_reported() -> None:
    statements = "if wide:\n        cfg.model.hidden_size = 512\n    for each in parts:\n        cfg.rng.seed = 7\n    "
    plan = of_recipe(RECIPE.replace("return cfg", f"{statements}return cfg"))
    assumed = {entry.key: entry.kind for entry in plan.ledger if "its body is assumed to run once" in entry.why}
    assert assumed == {"if wide": "assumed", "for each": "assumed"} and not plan.mistakes
    spec = read_back(plan.text)
    assert (spec.model.hidden, spec.train.seed) == (512, 7)


def test_a_key_of_a_named_precision_may_be_set_anew() -> None:
    statements = (
        'cfg.mixed_precision = "bf16_mixed"\n    cfg.mixed_precision.grad_reduce_in_fp32 = False\n    return cfg'
    )
    spec = read_back(of_recipe(RECIPE.replace("return cfg", statements)).text)
    assert (spec.precision.compute, spec.precision.gradients) == ("bf16", "bf16")


def test_an_explicit_kind_of_attention_is_used() -> None:
    """An explicit `multi_latent_attention` overrides the class of the model."""
    for kind, value, name in (("gqa", "False", "MLA"), ("mla", "True", "GPT")):
        text = RECIPE.replace("MLA", name).replace("qk_layernorm=True", f"multi_latent_attention={value}")
        assert read_back(of_recipe(text).text).model.attention.kind == kind


@pytest.mark.parametrize(
    ("arguments", "kv_heads"),
    [
        ("", 4), ("--num-query-groups 2", 4), ("--group-query-attention", 1),
        ("--group-query-attention --num-query-groups 2", 2),
    ],
)  # fmt: skip
def test_queries_are_grouped_if_the_script_asks_for_it(arguments: str, kv_heads: int) -> None:
    plan = of_script(SCRIPT.replace("--multi-latent-attention", arguments))
    attention = read_back(plan.text).model.attention
    assert isinstance(attention, Gqa) and attention.kv_heads == kv_heads


def test_queries_of_a_recipe_are_grouped_by_their_number() -> None:
    text = RECIPE.replace("MLA", "GPT").replace("qk_layernorm=True", "num_query_groups=2")
    attention = read_back(of_recipe(text).text).model.attention
    assert isinstance(attention, Gqa) and attention.kv_heads == 2


@pytest.mark.parametrize(
    ("score", "chosen", "lost"),
    [("softmax", 2, False), ("softmax", 4, True), ("sigmoid", 4, False), ("sigmoid", 2, True)],
)
def test_differing_scores_of_groups_are_reported(score: str, chosen: int, lost: bool) -> None:
    """Here a group's score is its best expert (softmax) or two best (sigmoid); in Megatron, topk / group_topk best."""
    router = f"moe_router_topk={chosen}, moe_router_num_groups=4, moe_router_group_topk=2"
    experts = f"num_layers=4, num_moe_experts=8, moe_router_score_function={score!r}, {router}"
    reported = changes(of_recipe(RECIPE.replace("num_layers=4", experts)))
    assert ("moe_router_group_topk" in reported) == lost
    if lost:
        entry = reported["moe_router_group_topk"]
        assert (entry.kind, entry.value) == ("approximated", "2") and "its best expert with softmax" in entry.why


@pytest.mark.parametrize("pattern", ["0", "-1", "'0'", "'-2'", "[0]*4", "'x'", "2.5"])
def test_an_invalid_pattern_of_layers_is_a_mistake(pattern: str) -> None:
    plan = of_recipe(RECIPE.replace("num_layers=4", f"num_layers=4, num_moe_experts=8, moe_layer_freq={pattern}"))
    assert plan.mistakes and "moe_layer_freq" in plan.mistakes[0].message


def test_null_is_not_a_size() -> None:
    text = RECIPE.replace("hidden_size=256", "hidden_size=None").replace("vocab_size=512", "vocab_size=None")
    plan = of_recipe(text)
    assert [item.code for item in plan.mistakes] == ["I0202", "I0202"]
    spec = read_back(of_recipe(RECIPE.replace("train_iters=100", "train_iters=None, train_samples=800")).text)
    assert spec.train.tokens == 100 * 8 * 256


def test_computed_values_are_in_the_ledger(tmp_path: Path, capsys: Capture) -> None:
    """Only with --lossy is a spec written, with a default instead."""
    script, spec_file = tmp_path / "s.sh", tmp_path / "s.dsc"
    script.write_text(SCRIPT.replace("--adam-beta2 0.95", "--adam-beta2 $B"))
    command = ["import", "megatron-bridge", str(script), "--devices", "2", "-D", "DATA=a", "-o", str(spec_file)]
    assert main(command) == 2
    stderr = capsys.readouterr().err
    assert "computed: adam_beta2 = $B: train.optimizer.beta2: replaced by 0.999" in stderr
    assert "set it: -D B=VALUE" in stderr and not spec_file.exists()
    assert main([*command, "--lossy"]) == 0
    assert "# computed: adam_beta2 = $B" in spec_file.read_text()
    assert main([*command, "-D", "B=0.9", "--force"]) == 0
    assert "# computed" not in spec_file.read_text()


def test_a_function_that_returns_nothing_has_no_values(tmp_path: Path, capsys: Capture) -> None:
    for system, kind in (("megatron-bridge", "ConfigContainer"), ("torchtitan", "Trainer.Config")):
        for body in ("raise ValueError", "print(1)", "...", "return"):
            file = tmp_path / "recipe.py"
            file.write_text(f"def f() -> {kind}:\n    {body}\n")
            assert main(["import", system, str(file)]) == 2
            assert "I0202" in capsys.readouterr().err
