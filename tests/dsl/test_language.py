"""The meaning of the language: values, composition, phases, defaults and overrides; and the shipped specs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsl.closed_forms import ramp
from dsl.load import check, load, resolve
from dsl.messages.diagnostics import SpecError
from dsl.rules import train_refusals
from dsl.schema import Dense, Moe, Phase, RatePhase, Spec, Tile, TrainTokenizer, value_at

SPECS = Path(__file__).parents[2] / "specs"
BASE = Path(__file__).parents[1] / "ui" / "lib" / "base.dsc"


def read(tmp_path: Path, text: str, *overrides: str, run: str | None = None, **files: str) -> Spec:
    """The spec of a text that may import `base.dsc` and `files`."""
    (tmp_path / "base.dsc").write_bytes(BASE.read_bytes())
    for name, content in files.items():
        (tmp_path / f"{name}.dsc").write_text(content, encoding="utf-8")
    (tmp_path / "spec.dsc").write_text('import "base.dsc"\n' + text, encoding="utf-8")
    return load(tmp_path / "spec.dsc", run, overrides)


# ---------------------------------------------------------------- shipped specs


def test_deepseek_v3_resolves_to_the_published_model() -> None:
    spec = load(SPECS / "deepseek-v3.dsc")
    model, moe = spec.model, spec.model.ffn(3)
    assert (model.num_layers, model.hidden, model.vocab) == (61, 7168, 129_280)
    assert [isinstance(model.ffn(layer), Dense) for layer in (0, 2, 3, 60)] == [True, True, False, False]
    assert isinstance(moe, Moe) and (moe.experts, moe.top_k, moe.groups, moe.top_groups) == (256, 8, 8, 4)
    assert (moe.score, moe.normalize, moe.scale, moe.balance.sequence_loss) == ("sigmoid", True, 2.5, 1e-4)
    assert moe.balance.bias_rate == (
        Phase(value=0.001, until_tokens=14_300_000_000_000),
        Phase(value=0.0),
    )
    assert spec.cluster.world == 2048 and spec.parallel.data == 128
    device = spec.cluster.node.device
    assert device.memory == int(79.1 * 2**30) and device.hbm == 3.35e12 and device.price == 2.0
    assert spec.precision.activation_tile == Tile(rows=1, columns=128) and spec.precision.compute == "bf16"
    assert spec.recompute == ("rmsnorm", "mla_up", "swiglu") and spec.sm.communication == 20
    assert spec.train.tokens == 14_800_000_000_000 and spec.data.validation == 0.001


def test_deepseek_v3_rate_and_batch_follow_the_paper() -> None:
    spec = load(SPECS / "deepseek-v3.dsc")
    steps = ramp.ramp_of_spec(spec)
    assert [phase.shape for phase in spec.train.rate] == ["linear", "constant", "cosine", "constant", "constant"]
    assert spec.train.rate[0].end_tokens == steps.tokens_at(2000)
    assert [phase.end_tokens for phase in spec.train.rate[1:]] == [
        10_000_000_000_000,
        14_300_000_000_000,
        14_633_000_000_000,
        14_800_000_000_000,
    ]
    assert [phase.end for phase in spec.train.rate] == [2.2e-4, 2.2e-4, 2.2e-5, 2.2e-5, 7.3e-6]
    sizes = [batch for batch, _ in steps.phases(spec.train.tokens)]
    assert sizes == list(range(3072, 15360 + 1, 2 * 128))
    assert sizes[0] // 128 == 24 < 2 * spec.parallel.pipeline <= sizes[-1] // 128 == 120


def test_features_that_cannot_train_are_reported_at_their_place() -> None:
    assert train_refusals(load(SPECS / "deepseek-v3.dsc")) == ()
    resolved = resolve(SPECS / "deepseek-v3.dsc", overrides=["precision.combine=e4m3", "parallel.route=flat"])
    assert [item.code for item in train_refusals(resolved.spec, resolved.origins)] == ["E1001"]
    assert all(item.span is not None for item in train_refusals(resolved.spec, resolved.origins))


@pytest.mark.parametrize("name", ["quickstart", "tiny"])
def test_small_specs_train(name: str) -> None:
    assert train_refusals(load(SPECS / f"{name}.dsc")) == ()
    assert train_refusals(load(SPECS / f"{name}.dsc", overrides=["precision=bf16"])) == ()


def test_quickstart_has_every_part_of_v3() -> None:
    spec = load(SPECS / "quickstart.dsc")
    p = spec.parallel
    assert (p.pipeline, p.expert, p.data, spec.schedule.name, spec.cluster.world) == (2, 2, 2, "dualpipe", 4)
    assert [type(span.ffn) for span in spec.model.layers] == [Dense, Moe]
    assert spec.model.attention.query_rank and spec.model.mtp is not None
    assert spec.data.source == "python_stdlib" and isinstance(spec.data.tokenizer, TrainTokenizer)


@pytest.mark.parametrize("path", sorted(SPECS.rglob("*.dsc")), ids=lambda path: path.stem)
def test_shipped_files_are_right(path: Path) -> None:
    assert check(path) == ()


SHOWN = Path(__file__).parent / "shown"  # the examples of the language's design page, verbatim


@pytest.mark.parametrize("path", sorted(SHOWN.rglob("*.dsc")), ids=lambda path: path.parent.name)
def test_specs_shown_in_the_design_are_valid(path: Path) -> None:
    assert check(path) == ()


def test_specs_shown_in_the_design_mean_what_the_text_states() -> None:
    spec = load(SHOWN / "deepseek-v3.dsc")
    assert spec == load(SPECS / "deepseek-v3.dsc", overrides=["precision=fp8_block"])
    mini = load(
        SHOWN / "deepseek-v3.dsc", overrides=["model=deepseek_v3_mini", "parallel.pipeline=8", "parallel.expert=32"]
    ).model
    assert [(span.first, span.last, span.ffn.inner) for span in mini.layers] == [(0, 0, 1024), (1, 7, 256)]
    laptop = load(SHOWN / "deepseek-v3.dsc", overrides=["cluster=laptop", "model.hidden=8", *SMALL]).cluster
    assert (laptop.world, laptop.node.device.cores, laptop.node.device.memory) == (4, 1, 4 * 10**9)


SMALL = (  # a model that fits a laptop, in a run on its four devices
    "model=deepseek_v3_mini", "model.vocab=512", "model.attention.heads=2", "model.attention.query_rank=8",
    "model.layers.0.ffn.inner=128", "model.layers.1.ffn.inner=128", "precision=fp32", "parallel.pipeline=2",
    "parallel.expert=2", "sm.communication=0", "train.batch=64", "model.attention.kv_rank=8", "recompute=[]",
)  # fmt: skip


# ---------------------------------------------------------------- values


def test_units_arithmetic_and_references(tmp_path: Path) -> None:
    spec = read(
        tmp_path,
        """
        let width = 64
        let twice = width * 2
        run a extends base {
          model = m
          let ranks = 4 / 2
          parallel { pipeline = ranks, expert = parallel.pipeline }
          train { sequence = (twice - 64) * 2, micro_batch = sequence / 128, batch = 1_6 }
        }
        model m extends base {
          hidden = twice
          layers 0..0 { ffn dense { inner = model.hidden * 4 } }
          layers 1..1 + 2 { ffn moe { inner = hidden + attention.head_dim.nope } }
        }
        cluster four { node { device cpu { memory = 2 * 4GiB, hbm = 400Gb/s, price = 48USD/d } } }
        """,
    )
    dense, moe = spec.model.ffn(0), spec.model.ffn(3)
    assert (dense.inner, moe.inner, spec.model.num_layers) == (512, 128 + 32, 4)
    assert (spec.parallel.pipeline, spec.parallel.expert) == (2, 2)
    assert (spec.train.sequence, spec.train.micro_batch, spec.train.batch.end) == (128, 1, 16)
    device = spec.cluster.node.device
    assert (device.memory, device.hbm, device.price) == (8 * 2**30, 50e9, 2.0)


def test_a_reference_reaches_into_blocks_that_the_run_names(tmp_path: Path) -> None:
    train = "sequence = model.hidden - model.attention.kv_rank, micro_batch = cluster.nodes"
    text = f"run a extends base {{ train {{ {train} }} }}"
    spec = read(tmp_path, text)
    assert (spec.train.sequence, spec.train.micro_batch) == (128, 1)


def test_a_let_is_visible_in_its_block_and_nested_ones(tmp_path: Path) -> None:
    text = """
    let where = "outside"
    run a extends base {
      let where = "a/*.txt", let order = 1f1b, let entries = model.vocab / 8
      schedule { name = order }
      data { source = where, tokenizer = train(entries) }
    }
    """
    spec = read(tmp_path, text)
    assert (spec.data.source, spec.schedule.name) == ("a/*.txt", "1f1b")
    assert spec.data.tokenizer == TrainTokenizer(vocab=512)


def test_a_key_may_be_taken_away(tmp_path: Path) -> None:
    text = "model base {\n layers 1..3 { ffn moe { balance { bias_rate = none } } }\n layers 0..0 { ffn dense { } }\n }"
    moe = read(tmp_path, text + "\nrun a extends base { }").model.ffn(1)
    assert isinstance(moe, Moe) and moe.balance.bias_rate is None and moe.balance.sequence_loss == 1e-4


def test_phases(tmp_path: Path) -> None:
    text = "model base { mtp { weight = 0.3 until 1M tokens then 0.2 until 20 * 1000 steps then 0.1 } }"
    spec = read(tmp_path, text + "\nrun a extends base { }")
    assert spec.model.mtp is not None
    weight = spec.model.mtp.weight
    assert weight[1].until_tokens == 20_000 * 16 * 128
    assert [value_at(weight, tokens) for tokens in (0, 999_999, 1_000_000, 10**9)] == [0.3, 0.3, 0.2, 0.1]


def test_rate_lines(tmp_path: Path) -> None:
    lines = """
      linear from 1e-5 to 1e-3 over 10 steps
      constant 10 steps
      linear to 5e-4 until 30 steps
      constant at 2e-4
    """
    spec = read(tmp_path, f"run a extends base {{ train {{ rate {{ {lines} }} }} }}")
    step = 16 * 128
    assert spec.train.rate == (
        RatePhase(shape="linear", start=1e-5, end=1e-3, end_tokens=10 * step),
        RatePhase(shape="constant", start=1e-3, end=1e-3, end_tokens=20 * step),
        RatePhase(shape="linear", start=1e-3, end=5e-4, end_tokens=30 * step),
        RatePhase(shape="constant", start=2e-4, end=2e-4, end_tokens=100 * step),
    )


def test_defaults(tmp_path: Path) -> None:
    text = """
      run a {
        model = base, cluster = one, precision = fp64
        train { sequence = 8, micro_batch = 1, batch = 3, steps = 7, optimizer adamw { }, rate { constant at 1e-3 } }
        data { source = "a/*.txt", tokenizer = "tokenizer.json" }
      }
      run b extends a { cluster = four, parallel { pipeline = 2 }, train { batch = 8 } }
      cluster one extends four { node { devices = 1 } }
    """
    spec = read(tmp_path, text, run="a")
    degrees = {"pipeline": 1, "expert": 1, "expert_tensor": 1, "data": 1, "tensor": 1, "context": 1, "zero": 0}
    assert spec.parallel.model_dump() == degrees | {
        "layout": None,
        "placement": None,
        "route": None,
        "shard": None,
        "overlap_reduce": True,
    }
    assert (spec.schedule.name, spec.recompute, spec.train.checkpoint, spec.train.seed) == ("1f1b", (), None, 1)
    assert spec.train.tokens == 7 * 3 * 8
    extended = read(tmp_path, text, run="b")
    assert (extended.schedule.name, extended.parallel.data) == ("dualpipe", 2)


# ---------------------------------------------------------------- composition


def test_a_child_inherits_values_that_it_does_not_set() -> None:
    spec = load(
        SPECS / "deepseek-v3.dsc", overrides=["model=deepseek_v3_mini", "parallel.pipeline=8", "parallel.expert=32"]
    )
    moe = spec.model.ffn(7)
    assert isinstance(moe, Moe)
    assert (spec.model.num_layers, spec.model.hidden, spec.model.vocab) == (8, 512, 129_280)
    assert (moe.experts, moe.inner, moe.groups, moe.top_groups, moe.top_k) == (32, 256, 4, 2, 4)
    assert (moe.shared, moe.scale, len(moe.balance.bias_rate)) == (1, 2.5, 2)  # from the parent's only moe


def test_later_blocks_override_earlier_ones(tmp_path: Path) -> None:
    text = """
      import "other.dsc"
      model base { hidden = 64, attention { heads = 2 } }
      run a { train { seed = 3 } }
    """
    imported = 'import "base.dsc"\nrun a extends base { train { seed = 2 } }\n'
    spec = read(tmp_path, text, other=imported + "cluster four { node { device { memory = 1GB } } }")
    assert (spec.model.hidden, spec.model.vocab, spec.model.attention.heads, spec.model.attention.kv_rank) == (
        64,
        4096,
        2,
        64,
    )
    assert (spec.train.seed, spec.train.sequence) == (3, 128)
    assert (spec.cluster.node.device.memory, spec.cluster.node.devices, spec.cluster.node.device.name) == (
        10**9,
        4,
        "cpu",
    )


def test_a_file_is_imported_once_and_before_the_rest(tmp_path: Path) -> None:
    text = """
      run a extends base { train { seed = 5 } }
      import "left.dsc"
      import "right.dsc"
    """
    left = 'import "common.dsc"\nrun a { train { seed = 4 } }\nmodel base { hidden = 32 }'
    common = 'import "base.dsc"\nlet count = 3\nmodel base { hidden = 64 }'
    spec = read(tmp_path, text, left=left, right='import "common.dsc"', common=common)
    assert (spec.train.seed, spec.model.hidden) == (5, 32)
    assert read(tmp_path, text, left='import "common.dsc"', right=left, common=common).model.hidden == 32


def test_steps_and_tokens_replace_each_other(tmp_path: Path) -> None:
    assert read(tmp_path, "run a extends base { train { tokens = 1M } }").train.tokens == 10**6
    assert (
        read(tmp_path, "run a extends base { train { tokens = 1M } }", "train.steps=50").train.tokens == 50 * 16 * 128
    )


def test_a_batch_may_become_a_ramp_and_back(tmp_path: Path) -> None:
    text = "run a extends base { train { batch { from = 16, to = 32, over = 50K tokens }, steps = 100 } }"
    spec = read(tmp_path, text)
    assert (spec.train.batch.start, spec.train.batch.end, spec.train.batch.over_tokens) == (16, 32, 50_000)
    assert read(tmp_path, text, "train.batch=16").train.batch.over_tokens == 0


def test_overrides_win_and_are_origins(tmp_path: Path) -> None:
    (tmp_path / "spec.dsc").write_bytes(BASE.read_bytes())
    overrides = [
        "model.hidden=256",
        "schedule.name=1f1b",
        "data.source=corpus/*.jsonl",
        "cluster.node.device.memory=8GiB",
    ]
    resolved = resolve(tmp_path / "spec.dsc", overrides=overrides)
    spec = resolved.spec
    assert (spec.model.hidden, spec.schedule.name, spec.data.source) == (256, "1f1b", "corpus/*.jsonl")
    assert spec.cluster.node.device.memory == 8 * 2**30
    assert str(resolved.origins["model.hidden"]) == "-s:1:14"
    assert resolved.origins["model.vocab"].text == "4096"


@pytest.mark.parametrize("text", ["corpus/a b (1).txt", "a#b", "data/*.jsonl", "x, y", "a = b", "café", "1e5"])
def test_a_text_needs_no_quotes_on_the_command_line(text: str, tmp_path: Path) -> None:
    for quoted in (text, f'"{text}"'):
        spec = read(tmp_path, "run a extends base { }", f"data.source={quoted}", f"data.tokenizer={quoted}")
        assert (spec.data.source, spec.data.tokenizer) == (text, text)


@pytest.mark.parametrize("text", ["a\nb", "a\x1bb", "a\udcffb", '"a'])
def test_a_text_that_cannot_be_written_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"-s:1:1"):
        read(tmp_path, "run a extends base { }", f"data.source={text}")


def test_an_optional_block_may_be_none(tmp_path: Path) -> None:
    run = "run a extends base { model = b, train { validate { every = 5 } } }"
    text = f"{run}\nmodel b extends base {{ mtp {{ depth = 1, weight = 0.1 }} }}"
    assert read(tmp_path, text).model.mtp is not None
    spec = read(tmp_path, text, "model.mtp=none", "train.validate=none")
    assert spec.model.mtp is None and spec.train.validate is None
    assert read(tmp_path, f"{run}\nmodel b extends base {{ mtp = none }}").model.mtp is None


def test_three_mistakes_are_three_errors(tmp_path: Path) -> None:
    mistakes = "  recompute = [rmsnorm,, swiglu]\n  parallel { pipelin = 4 }\n  train { batch = 16GB }\n"
    text = f"run a extends base {{\n{mistakes}}}"
    with pytest.raises(SpecError) as caught:
        read(tmp_path, text)
    places = [(item.code, item.span.line, item.span.column) for item in caught.value.diagnostics if item.span]
    assert places == [("E0108", 3, 24), ("E0201", 4, 14), ("E0301", 5, 19)]
