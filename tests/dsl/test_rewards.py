"""Runs that learn from rewards, in the language: round trips of their text, overrides, and runs that extend them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsl import schema
from dsl.canonical import canonical
from dsl.load import load
from dsl.messages.diagnostics import Source
from dsl.text.formatter import format_source
from tests import copies
from tests.dsl.test_roundtrip import names, reread, small, texts
from tests.specs.shipped import SPECS

LIB = Path(__file__).parents[1] / "ui" / "lib"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a right spec of a run that learns from rewards."""
    for name in ("base.dsc", "rewards.dsc"):
        copies.copy(LIB / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def extended(place: Path, text: str, *overrides: str) -> schema.Spec:
    """The run `mine` of a text, which may extend that run."""
    (place / "mine.dsc").write_text(f'import "rewards.dsc"\n{text}\n', "utf-8")
    return load("mine.dsc", "mine", overrides)


def rewards_of(spec: schema.Spec) -> dict[str, tuple[str, float]]:
    assert spec.train.grpo is not None
    return {reward.name: (reward.check, reward.weight) for reward in spec.train.grpo.rewards}


def test_a_run_that_extends_another_has_its_rewards_and_its_own(place: Path) -> None:
    text = (
        "run mine extends rewarded { train { grpo { rewards { correct { weight = 2 }, shape { check = format } } } } }"
    )
    assert rewards_of(extended(place, text)) == {"correct": ("exact", 2), "shape": ("format", 1)}


def test_an_override_sets_a_reward_by_its_name_or_adds_one(place: Path) -> None:
    text = "run mine extends rewarded { }"
    overrides = ("train.grpo.rewards.correct.weight=0.5", "train.grpo.rewards.shape.check=format", "train.grpo.group=4")
    spec = extended(place, text, *overrides)
    assert rewards_of(spec) == {"correct": ("exact", 0.5), "shape": ("format", 1)}
    assert spec.train.grpo is not None and spec.train.grpo.group == 4


def test_a_run_that_extends_another_may_learn_from_text_again(place: Path) -> None:
    spec = extended(place, "run mine extends rewarded { train { grpo = none }, data { prompts = none } }")
    assert spec.train.grpo is None and spec.data.prompts is None


@st.composite
def rewards(draw: st.DrawFn) -> schema.Reward:
    seconds = {"seconds": draw(small(0.1, 86_400))}
    return draw(
        st.sampled_from(
            [
                {"check": "exact"},
                {"check": "format"},
                {"check": "regex", "pattern": draw(texts.map(re.escape)), **seconds},
                {"check": "python", "file": draw(texts), "function": draw(names), **seconds},
            ]
        ).map(lambda keys: schema.Reward(name=draw(names), weight=draw(small(1, 1e6)), **keys))
    )


@st.composite
def rewarded(draw: st.DrawFn) -> schema.Spec:
    """A run of the smallest spec that learns from rewards."""
    spec = load(SPECS / "tiny.dsc")
    prompt = draw(st.integers(1, spec.train.sequence - 1))
    grpo = schema.Grpo(
        group=draw(st.sampled_from([2, 4])),
        prompt=prompt,
        completion=draw(st.integers(1, spec.train.sequence - prompt)),
        temperature=draw(small(0.01, 100)),
        iterations=draw(st.integers(1, 1000)),
        slots=draw(st.none() | st.integers(1, 10**6)),
        clip_low=draw(small(0, 1)),
        clip_high=draw(small(0, 1000)),
        kl=draw(small(0, 1000)),
        loss=draw(st.sampled_from(["grpo", "dapo", "dr_grpo"])),
        scale=draw(st.sampled_from(["group", "batch", "none"])),
        rewards=tuple(draw(st.lists(rewards(), min_size=1, max_size=4, unique_by=lambda reward: reward.name))),
    )
    prompts = schema.Prompts(prompt=draw(texts), answer=draw(st.none() | texts))
    data = spec.data.model_copy(update={"source": draw(texts), "tokenizer": draw(texts), "prompts": prompts})
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"mtp": None}),
            "train": spec.train.model_copy(update={"grpo": grpo}),
            "data": data,
        }
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(rewarded())
def test_parse_of_print_is_the_identity(spec: schema.Spec) -> None:
    text = canonical(spec)
    assert reread(text) == spec
    laid = format_source(Source("laid", text))
    assert reread(laid) == spec
    assert format_source(Source("laid", laid)) == laid
