"""Words of other systems: each maps to a key of the language and is not a key itself, and its hint works."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsl.facts import vocabulary
from dsl.load import analyse
from dsl.messages.diagnostics import Source
from dsl.messages.spelling import nearest_words, num_edits
from dsl.reference import find, keys
from dsl.reference.keys import without_kinds
from dsl.resolve.meant import WHY_NOT_IN_MLA
from dsl.schema import OPTIMIZERS, Compressed, Gqa, Mla
from dsl.text.edits import apply, edit_of

BASE = (Path(__file__).parents[1] / "ui" / "lib" / "base.dsc").read_text("utf-8")
PLACES = {without_kinds(path) for path in keys()}
DEGREES = ("pipeline", "expert", "data", "tensor", "context", "zero")


def said(text: str) -> dict[str, str]:
    """The hints about keys and kinds in a text, by the word that they are about."""
    analysis = analyse("spec.dsc", reader=lambda _: (Source("spec.dsc", BASE + text), ()))
    return {item.span.text: item.hint for item in analysis.diagnostics if item.span is not None}


# ---------------------------------------------------------------- the tables


def test_every_word_leads_to_a_key() -> None:
    for word, paths in vocabulary.KEYS.items():
        assert paths and {*paths} <= PLACES and vocabulary.paths_of(word.upper()) == paths, word
    assert all(vocabulary.paths_of(word) == (entry.path,) for word, entry in vocabulary.OTHERS.items())
    assert vocabulary.paths_of("no_such_word") == ()
    for table in (vocabulary.OTHERS, vocabulary.WORDS):
        for word, entry in table.items():
            assert entry.path in PLACES, word
            assert find(entry.topic or entry.path), word


def test_no_word_is_a_key_of_the_language_at_its_place() -> None:
    for word, paths in vocabulary.KEYS.items():
        assert word == word.lower() and not any(f"{path.rpartition('.')[0]}.{word}" in PLACES for path in paths), word
    assert not vocabulary.KEYS.keys() & vocabulary.OTHERS.keys()
    assert not vocabulary.ABSENT.keys() & {*vocabulary.KEYS, *vocabulary.OTHERS, *vocabulary.WORDS}
    assert not vocabulary.ABSENT.keys() & {path.rpartition(".")[2] for path in PLACES}
    assert all(find(word) for word in vocabulary.SYNONYMS.values() if word not in ("true", "false"))


def test_every_word_is_explained() -> None:
    for word in (*vocabulary.KEYS, *vocabulary.OTHERS, *vocabulary.ABSENT, *vocabulary.WORDS, *vocabulary.SYNONYMS):
        assert find(word), word
    first, *rest = find("gpus_per_node")
    assert first.summary == "here it is `cluster.node.devices`" and rest[0].name == "cluster.node.devices"
    assert [topic.name for topic in find("mha")] == ["mha", "model.attention.gqa"]
    assert "kv_heads = heads" in find("mha")[0].text


def test_a_foreign_key_is_looked_up_in_its_block() -> None:
    blocks = {path.rpartition(".")[0] for paths in vocabulary.KEYS.values() for path in paths}
    for word, paths in vocabulary.KEYS.items():
        for block in blocks:
            matching = [path for path in paths if path.rpartition(".")[0] == block]
            assert vocabulary.key_in(word.upper(), block) == (matching[0].rpartition(".")[2] if matching else ""), word
    assert vocabulary.key_in("qqq", "train") == ""


# ---------------------------------------------------------------- hints


def test_hints_for_foreign_keys_depend_on_the_block() -> None:
    hints = said(
        "run a extends base { parallel { pp = 2, gpus = 8 }\n train { optimizer adamw { lr = 1e-3, wd = 0.1 } } }"
    )
    assert hints["pp"] == "did you mean `pipeline`?"
    assert hints["gpus"] == "here it is `cluster.node.devices`"
    assert hints["lr"].startswith("in `train`, write `rate { constant at 1e-3 }`")
    assert hints["wd"] == "did you mean `weight_decay`?"


def test_keys_of_rewards_get_a_hint() -> None:
    words = {"num_generations": "group", "max_response_length": "completion", "epsilon_high": "clip_high"}
    text = ", ".join(f"{word} = 8" for word in words)
    hints = said(f"run a extends base {{ train {{ grpo {{ {text} }} }} }}")
    assert {word: hints[word] for word in words} == {word: f"did you mean `{key}`?" for word, key in words.items()}
    assert said("run a extends base { train { reward_funcs = 1 } }")["reward_funcs"].startswith(
        "in `train.grpo`, write"
    )
    assert (
        said("run a extends base { data { iterations = 8 } }")["iterations"] == "move it into `grpo { … }` of `train`"
    )


def test_features_that_the_language_lacks_are_named_as_such() -> None:
    attention = "attention gqa { heads = 4, kv_heads = 2, head_dim = 16, rope { theta = 10_000 }, KEYS }"
    words = ("norm_type", "dropout", "clip_qkv")
    hints = said(f"model m extends base {{ {attention.replace('KEYS', ', '.join(f'{word} = 1' for word in words))} }}")
    assert {*words} <= hints.keys()
    assert all(hints[word].startswith("there is no such key: ") for word in words)
    assert "RMSNorms" in hints["norm_type"]
    hints = said(f"model m extends base {{ {attention.replace('KEYS', 'frobnicate = 1')} }}")
    keys_there = [f"`{key}`" for key in Gqa.model_fields if key not in ("kind", "rope")]
    assert hints["frobnicate"] == f"`attention gqa` takes {', '.join(keys_there)} and `rope`"


def test_keys_of_grouped_queries_that_latent_attention_lacks_are_explained() -> None:
    grouped, latent = set(Gqa.model_fields), set(Mla.model_fields)
    assert set(WHY_NOT_IN_MLA) <= grouped - latent
    text = ", ".join(f"{word} = 1" for word in grouped - latent)
    hints = said(f"model m extends base {{ attention mla {{ {text} }} }}")
    for word in grouped - latent:
        blocks = "`attention gqa`" + (" or `attention compressed`" if word in Compressed.model_fields else "")
        why = WHY_NOT_IN_MLA.get(word, "remove it")
        assert hints[word] == f"it is a key of {blocks}, but this is `attention mla`, {why}"
    assert said("model m extends base { layers 0..0 { ffn dense { mlp_bias = 1 } } }")["mlp_bias"] == (
        "write `bias = true` in `ffn`; `bias_rate` is for balancing the experts"
    )


def test_a_key_of_another_block_gets_a_hint_to_its_block() -> None:
    """All keys, taken from the schema, so that no list of them can become outdated."""
    of_data = {path.rpartition(".")[2] for path in keys() if path.rpartition(".")[0] == "data"}
    for path, key in keys().items():
        word = key.name
        if word in of_data:
            continue  # it belongs there
        hint = said(f"run a extends base {{ data {{ {word} = 1 }} }}").get(word, "")
        if not hint.startswith("did you mean"):
            head = path.rpartition(".")[0].rpartition(".")[2] or "run"
            assert hint.startswith("move it into `") and head in hint, (path, hint)
    hints = said("run a extends base { train { weight_decay = 0.1, gradient_accumulation = 4 } }")
    assert hints["weight_decay"].startswith("move it into `optimizer ")
    assert all(f"`optimizer {kind} {{ … }}`" in hints["weight_decay"] for kind in OPTIMIZERS)
    assert "batch / (data · micro_batch)" in hints["gradient_accumulation"]


def test_a_key_written_in_another_way_is_shown_with_its_value() -> None:
    hints = said("run a extends base { train { lr = 3e-4, epochs = 2, optimizer adamw { betas = [0.9, 0.95] } } }")
    assert hints["lr"].startswith("write `rate { constant at 3e-4 }`")
    assert "`tokens` or `steps`" in hints["epochs"]
    assert hints["betas"] == "write `beta1 = 0.9, beta2 = 0.95`"
    for kind, wanted in (("attention mha { heads = 4 }", "`attention gqa { … }` with `kv_heads = heads`"),):
        assert wanted in said(f"model m extends base {{ {kind} }}")["mha"]
    assert "adamw" in said("run a extends base { train { optimizer adam { } } }")["adam"]


def test_a_key_that_is_set_already_is_not_proposed() -> None:
    """A hint does not suggest a key that the block sets, before or after the word; inherited keys may be changed."""
    hints = said("run a extends base { train { micro_batch = 1, micro_bach = 2, batch = 8, global_batch = 16 } }")
    assert hints["micro_bach"] == "remove it, or change `micro_batch`"
    assert hints["global_batch"] == "remove it, or change `batch`"
    assert said("run a extends base { train { micro_bach = 2 } }")["micro_bach"] == "did you mean `micro_batch`?"
    assert said("run a extends base { train { step = 4, tokens = 10B } }")["step"] == "remove it, or change `tokens`"


def test_a_key_that_is_missing_comes_first() -> None:
    data = "date { source = python_stdlib, tokenizer = train(512) }"
    text = (
        f"run a {{ model = base, cluster = four, precision = fp32, parallel {{ }}, train {{ sequenc = 4 }}, {data} }}"
    )
    assert said(text)["date"] == "did you mean `data`?"
    hints = said("cluster c { nodes = 1, nod { devices = 1, device a { memory = 1GB } } }")
    assert hints["nod"] == "did you mean `node`?"


# ---------------------------------------------------------------- spelling


@pytest.mark.parametrize(
    ("word", "words", "meant"),
    [
        ("pipelin", DEGREES, ("pipeline",)),
        ("beta", ("beta1", "beta2", "eps"), ("beta1", "beta2")),
        ("mha", ("mla", "gqa"), ()),
        ("too", ("to", "from", "over"), ("to",)),
        ("warm", ("warmup", "linear"), ("warmup",)),
        ("ffn_d", ("ffn_dim", "ffn_dense"), ("ffn_dim",)),
        ("dualpip", ("dualpipe", "dualpipev"), ("dualpipe",)),
        ("fp16", ("fp32", "fp64", "bf16"), ()),
        ("fp23", ("fp32", "fp64", "bf16"), ("fp32",)),
        ("global_batch", ("micro_batch", "rate"), ()),
        ("Hidden", ("hidden", "vocab"), ("hidden",)),
        ("", ("a",), ()),
        ("x" * 65, ("x" * 64,), ()),
    ],
)
def test_nearest(word: str, words: tuple[str, ...], meant: tuple[str, ...]) -> None:
    assert nearest_words(word, words) == meant


def test_edits_are_counted() -> None:
    pairs = (("abc", "abc"), ("abc", "acb"), ("abc", "ab"), ("", "ab"), ("abcd", "acbde"))
    assert [num_edits(*pair) for pair in pairs] == [0, 1, 1, 2, 2]


def test_very_many_names_take_no_time() -> None:
    """Names beyond the limit are not compared, so the cost of a hint does not grow with a text."""
    assert nearest_words("b" * 30, ["a" * 29 + str(index) for index in range(50_000)]) == ()


# ---------------------------------------------------------------- hints that are edits


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("memory = 80 GB", "memory = 80GB"),
        ("hbm = 200 GB / s", "hbm = 200GB/s"),
        ("bf16 = 989 TFLOPS", "bf16 = 989TFLOPS"),
        ('cores = "8"', "cores = 8"),
        ("memory = 80GiBs", None),
        ("memory: 80GB", "memory = 80GB"),
        ("cores = 8; sms = 4", "cores = 8, sms = 4"),
    ],
)
def test_a_value_written_as_elsewhere(wrong: str, right: str | None) -> None:
    text = "cluster c extends four { node { device cpu { WRONG } } }\n"
    source = Source("spec.dsc", BASE + text.replace("WRONG", wrong))
    (item,) = analyse("spec.dsc", reader=lambda _: (source, ())).diagnostics
    edit = edit_of(item)
    if right is None:
        assert edit is None or edit.text.startswith("80"), "the number stays"
    else:
        assert edit is not None and apply(source.text, [edit]) == BASE + text.replace("WRONG", right)


@pytest.mark.parametrize(
    ("label", "meant"),
    [("1-3", "1..3"), ("1:3", ""), ("3", "3..3"), ("0 to 3", "0..3"), ('"0..3"', "0..3"), ("3-1", "")],
)
def test_a_range_of_layers_written_as_elsewhere(label: str, meant: str) -> None:
    source = Source("spec.dsc", BASE + f"model m extends base {{ layers {label} {{ ffn dense {{ inner = 8 }} }} }}\n")
    hints = [item.hint for item in analyse("spec.dsc", reader=lambda _: (source, ())).diagnostics]
    assert (f"write `layers {meant}`" in hints) == bool(meant), hints
