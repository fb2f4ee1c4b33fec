"""Uneven loads of experts beside simulated choices, and the next changes beside plans of all of them."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from compiler.predict.changes import MAX_SHOWN, next_changes, settings_of
from compiler.predict.imbalance import LOADS, load_effects
from compiler.predict.predict import predict, time_plan
from compiler.predict.prediction import Prediction
from dsl.closed_forms.loads import load_by_chance, variance
from dsl.load import load, resolve, variants
from dsl.schema import Spec
from tests.specs.shipped import path_of

GROUPED = """
model m {
  vocab = 512, hidden = 64, init_std = 0.02, norm_eps = 1e-6
  attention gqa { heads = 2, kv_heads = 1, head_dim = 32, rope { theta = 10000 } }
  layers 0..1 { ffn moe { experts = 32, groups = 8, top_groups = %d, top_k = 4, inner = 64
    shared = 1, score = softmax, normalize = true } }
}
cluster c { nodes = 2, node { devices = 8, device h100 { memory = 79.1GiB }, nvlink = 450GB/s, nic = 50GB/s } }
run r {
  model = m
  cluster = c
  precision = bf16
  parallel { expert = %d, data = 16 }
  schedule { name = 1f1b }
  train {
    sequence = 128, micro_batch = 1, batch = 64, steps = 10
    optimizer adamw { weight_decay = 0.1, clip = 1.0 }
    rate { constant at 1e-4 }
  }
  data { source = "*.txt", tokenizer = "bytes" }
}
"""


def grouped(tmp_path: Path, top_groups: int, expert: int) -> Spec:
    path = tmp_path / "grouped.dsc"
    path.write_text(GROUPED % (top_groups, expert), "utf-8")
    return load(path)


@pytest.mark.parametrize("top_groups", [2, 4, 8])
@pytest.mark.parametrize("expert", [2, 4, 8, 16])
def test_the_load_by_chance_is_that_of_drawn_choices(tmp_path: Path, top_groups: int, expert: int) -> None:
    """Tokens choose groups, then experts in them, as the spec says; the fullest of the ranks counts."""
    spec, draw = grouped(tmp_path, top_groups, expert), Random(top_groups * expert)
    tokens, trials = 128 * expert, 100
    loads = []
    for _ in range(trials):
        rows = [0] * expert
        for _ in range(tokens):
            candidates = [4 * group + member for group in draw.sample(range(8), top_groups) for member in range(4)]
            for chosen in draw.sample(candidates, 4):
                rows[chosen * expert // 32] += 1
        loads.append(max(rows) * expert / sum(rows))
    loads.sort()
    for quantile in (0.1, 0.5, 0.9):
        planned = load_by_chance(spec, quantile)
        # The share of drawn loads below it: three standard deviations, and what normal and independent ranks leave out.
        share = sum(drawn <= planned for drawn in loads) / trials
        assert share == pytest.approx(quantile, abs=3 * (quantile * (1 - quantile) / trials) ** 0.5 + 0.03)


@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "top_k", "ranks"),
    [
        (32, 8, 2, 4, 4),
        (32, 8, 4, 4, 16),
        (24, 6, 2, 4, 4),
        (24, 6, 1, 4, 4),
        (24, 8, 3, 6, 3),
        (16, 1, 1, 2, 8),
        (8, 4, 4, 8, 4),
    ],
)
def test_the_variance_of_a_rank_is_that_of_all_choices(
    experts: int, groups: int, top_groups: int, top_k: int, ranks: int
) -> None:
    """Beside all choices of groups, with hypergeometric counts in each; ranks may have parts of several groups."""
    moe = SimpleNamespace(experts=experts, groups=groups, top_groups=top_groups, top_k=top_k)
    of_group, variances = experts // groups, []
    for rank in range(ranks):
        here, chance, squares, means = range(rank * experts // ranks, (rank + 1) * experts // ranks), Fraction(0), 0, 0
        for chosen in combinations(range(groups), top_groups):
            among = [expert for group in chosen for expert in range(group * of_group, (group + 1) * of_group)]
            ours = sum(expert in here for expert in among)
            for count in range(min(ours, top_k) + 1):
                ways = comb(ours, count) * comb(len(among) - ours, top_k - count)
                weight = Fraction(ways, comb(len(among), top_k) * comb(groups, top_groups))
                chance, means, squares = chance + weight, means + weight * count, squares + weight * count**2
        assert chance == 1
        variances.append(squares - means**2)
    assert variance(moe, ranks) == pytest.approx(float(max(variances)))  # type: ignore[arg-type]


def test_a_fuller_rank_makes_the_step_longer() -> None:
    timed = time_plan(resolve(path_of("moe-8gpu")).spec)
    effects = load_effects(timed)
    assert [effect.load for effect in effects] == sorted(effect.load for effect in effects)
    assert [effect.seconds for effect in effects] == sorted(effect.seconds for effect in effects)
    assert tuple(effect.load for effect in effects if effect.quantile is None) == LOADS
    assert all(effect.seconds >= timed.step.seconds for effect in effects)
    # At most all of a step grows with the load.
    assert all(effect.seconds <= timed.step.seconds * effect.load * 1.01 for effect in effects)
    assert load_effects(time_plan(resolve(path_of("llama3-8b")).spec)) == ()


def test_an_even_load_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiler.predict.imbalance.load_by_chance", lambda spec, quantile: 1.0)
    for name in ("moe-8gpu", "deepseek-v3"):
        timed = time_plan(resolve(path_of(name)).spec)
        assert load_effects(timed)[0].seconds == timed.step.seconds


def peak(prediction: Prediction) -> int:
    return max(rank.peak_bytes for rank in prediction.ranks)


def test_the_next_changes_are_the_best_of_all() -> None:
    """Beside plans of every setting in full, without bounds."""
    path = path_of("moe-8gpu")
    resolved = resolve(path)
    legal = variants(str(path))
    base = predict(resolved.spec)
    found = next_changes(time_plan(resolved.spec), base.ranks, legal, resolved.origins, lambda share: None)
    steps = []
    for key, value in settings_of(resolved.spec):
        spec = legal([f"{key}={value}"])
        if spec is not None and spec != resolved.spec:
            prediction = predict(spec)
            if prediction.fits and (prediction.step.seconds, peak(prediction)) != (base.step.seconds, peak(base)):
                steps.append(prediction.step.seconds)
    assert [change.seconds for change in found] == sorted(steps)[:MAX_SHOWN]
    for change in found:
        spec = legal(f"{key}={value}" for key, value in change.settings)
        assert spec is not None
        prediction = predict(spec)
        assert prediction.step.seconds == change.seconds
        assert min(r.capacity_bytes - r.peak_bytes for r in prediction.ranks) == change.free_bytes
        assert change.is_exact == (spec.precision == resolved.spec.precision)


def test_changes_that_copies_of_shards_rule_out_are_tried_without_them() -> None:
    """`zero` below 2 and other expert groups do not go with `shard`."""
    path = path_of("quickstart")
    given = ["parallel.pipeline=1", "parallel.zero=3", "parallel.shard=2", "schedule.name=1f1b"]
    resolved, legal = resolve(path, None, given), variants(str(path), None, given)
    timed, base = time_plan(resolved.spec), predict(resolved.spec)
    found = next_changes(timed, base.ranks, legal, resolved.origins, lambda share: None)
    without = [change.settings for change in found if ("parallel.shard", "none") in change.settings]
    assert without and all(len(settings) == 2 for settings in without)
