"""Keys that are `auto`: the alternatives are exactly the values that a person could have written without an error."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from dsl.leaves import origin_of
from dsl.load import alternatives, check, load, resolve
from dsl.messages.diagnostics import SpecError
from dsl.schema import choices

SPECS = Path(__file__).resolve().parents[2] / "specs"
OPENED = ("parallel.pipeline", "parallel.expert", "train.micro_batch")


@pytest.mark.parametrize("file", ["quickstart.dsc", "laptop-gqa.dsc", "moe-8gpu.dsc"])
@pytest.mark.parametrize("opened", [OPENED[:1], OPENED[1:], OPENED])
def test_alternatives_are_exactly_the_valid_choices(file: str, opened: tuple[str, ...]) -> None:
    base = load(SPECS / file)
    tried = product(*(choices.values(base, path) for path in opened))
    legal = []
    for values in tried:
        overrides = [f"{path}={value}" for path, value in zip(opened, values, strict=True)]
        if not check(SPECS / file, overrides=overrides):
            legal.append((dict(zip(opened, values, strict=True)), load(SPECS / file, overrides=overrides)))
    auto = [f"{path}=auto" for path in opened]
    candidates = list(alternatives(SPECS / file, overrides=auto))
    assert [dict(choice) for choice, _ in candidates] == [choice for choice, _ in legal] and legal
    assert [spec for _, spec in candidates] == [spec for _, spec in legal]
    assert load(SPECS / file, overrides=auto) == legal[0][1]


@pytest.mark.parametrize(
    ("file", "ops"),
    [
        ("llama3-8b.dsc", ("rmsnorm", "swiglu", "attention")),
        ("quickstart.dsc", ("rmsnorm", "swiglu", "mla_up", "experts", "attention")),
        ("laptop-v4.dsc", ("rmsnorm", "swiglu", "hyper", "mla_up", "experts", "attention")),
    ],
)
def test_recomputation_is_tried_from_most_to_none(file: str, ops: tuple[str, ...]) -> None:
    values = choices.values(load(SPECS / file), "recompute")
    assert values == (("layer",), *(ops[:count] for count in range(len(ops), -1, -1)))
    for value in values:
        assert not check(SPECS / file, overrides=[f"recompute=[{', '.join(value)}]"])


def test_no_choice_keeps_the_rules() -> None:
    """The message is about the choice with the fewest mistakes; it gives the number of choices, and edits."""
    auto = [f"{path}=auto" for path in OPENED]
    (mistake,) = check(SPECS / "quickstart.dsc", overrides=(*auto, "train.batch=13"))
    assert mistake.code == "E0807"
    tried = 3 * len(choices.values(load(SPECS / "quickstart.dsc"), "parallel.expert"))  # 1, 2, 4 stages; 1 divides 13
    expected = f"none of the {tried} choices for `auto` passes the rules; shown for pipeline = 2, expert = 1"
    assert any(note.message.startswith(expected) for note in mistake.notes)


def test_choices_that_break_the_limit_of_nodes_are_passed_over() -> None:
    """With 128 expert ranks on 16 nodes, a token of DeepSeek-V3 would reach 8 nodes."""
    (wrong,) = check(SPECS / "deepseek-v3.dsc", overrides=("parallel.expert=128",))
    assert wrong.code == "E0922" and wrong.message.endswith("on up to 8 nodes, but max_nodes = 4")
    degrees = {
        spec.parallel.expert for _, spec in alternatives(SPECS / "deepseek-v3.dsc", overrides=("parallel.expert=auto",))
    }
    assert 64 in degrees and max(degrees) == 64


def test_experts_may_be_over_all_ranks_of_a_stage() -> None:
    """Two data ranks of four tensor ranks: expert degrees divide eight, or four if each expert rank has two devices."""
    words = (
        "parallel.expert=auto",
        "parallel.pipeline=1",
        "parallel.tensor=4",
        "cluster.nodes=1",
        "schedule.name=1f1b",
    )
    words += ("train.micro_batch=4", "cluster.node.device.memory=640GB")
    for extra, degrees in (((), {1, 2, 4, 8}), (("parallel.expert_tensor=2",), {1, 2, 4})):
        candidates = alternatives(SPECS / "qwen3-30b-a3b.dsc", overrides=(*words, *extra))
        assert {spec.parallel.expert for _, spec in candidates} == degrees


@pytest.mark.parametrize(("precision", "most"), [("bf16", 8), ("fp8_block", 8), ("mxfp8", 1), ("nvfp4", 1)])
def test_tensor_ranks_can_be_trained(precision: str, most: int) -> None:
    """An open degree of tensor ranks never gives a plan that `dsc compile` refuses."""
    overrides = (f"precision={precision}", "cluster.node.device.fp4=4PFLOPS")
    assert max(choices.values(load(SPECS / "llama3-8b.dsc", overrides=overrides), "parallel.tensor")) == most


@pytest.mark.parametrize(("sequence", "most"), [(2048, 1), (6144, 2), (8192, 4), (131072, 64)])
def test_context_ranks_have_long_chunks(sequence: int, most: int) -> None:
    """Each context rank has two chunks of at least 1,024 tokens; context degrees divide 256 devices."""
    spec = load(SPECS / "llama3-8b.dsc", overrides=(f"train.sequence={sequence}",))
    degrees = choices.values(spec, "parallel.context")
    assert degrees == tuple(2**power for power in range(most.bit_length()))
    assert all(sequence // (2 * degree) >= choices.LEAST_CHUNK for degree in degrees)


def test_unrelated_mistakes_are_reported_once() -> None:
    """A mistake that no choice resolves is reported once, without mistakes of the choices."""
    mistakes = check(SPECS / "quickstart.dsc", overrides=("parallel.pipeline=auto", "model.hidden=auto"))
    assert [mistake.code for mistake in mistakes] == ["E0302"]


def test_a_spec_without_a_cluster_is_refused_despite_auto() -> None:
    wrong = check(SPECS / "quickstart.dsc", overrides=("parallel.pipeline=auto", "cluster=nowhere"))
    assert [mistake.code for mistake in wrong] == ["E0401"]


def test_every_open_key_takes_auto() -> None:
    """Every open key takes `auto`, and the origin in the resolved spec says that it was chosen."""
    auto = [f"{path}=auto" for path in choices.OPEN]
    resolved = resolve(SPECS / "deepseek-v3.dsc", overrides=auto)
    assert set(resolved.opened) == set(choices.OPEN)
    for path in choices.OPEN:
        origin = origin_of(path, resolved.spec, resolved.origins)
        assert (origin.kind, origin.reason) == ("derived", "chosen among values that pass the rules")
    assert resolved.spec.recompute == ("layer",)
    assert resolved.spec.sm.communication == 20


def test_an_auto_layout_is_none() -> None:
    assert load(SPECS / "deepseek-v3.dsc", overrides=("parallel.layout=auto",)).parallel.layout is None


def test_only_open_keys_can_be_auto() -> None:
    with pytest.raises(SpecError, match="this value cannot be auto"):
        load(SPECS / "quickstart.dsc", overrides=("parallel.zero=auto",))


def test_nothing_is_open() -> None:
    assert not list(alternatives(SPECS / "quickstart.dsc"))
    assert resolve(SPECS / "quickstart.dsc").opened == ()
