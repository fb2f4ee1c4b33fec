"""Steps that learn from rewards, on ranks; each step that generates compares bits."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.schema import Spec
from runtime.build.build import Build
from runtime.launch.heartbeat import Board
from runtime.rl.generator import RolloutError
from tests.runtime.rl.learning import END, learning, steps
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import spec, with_rewards, without_mtp
from tests.traced import SharedSegments as Segments

SEQUENCE, NUM = 16, 16
MODELS = ("v3", "qwen")
STEPS = 4
Rows = list[dict[str, Any]]
# pipeline, expert and data ranks, zero
PLANS = [(1, 1, 1, 0), (2, 1, 2, 1), (2, 2, 2, 3), (1, 4, 4, 0)]


def rewarded(of: str, pp: int = 1, ep: int = 1, dp: int = 1, zero: int = 0, steps: int = STEPS, **keys: Any) -> Spec:
    """A spec whose step has `NUM` sequences, four for each prompt, for any plan."""
    base = spec(pp, ep, dp, NUM // (2 * dp), steps, zero, of, precision="fp32", sequence=SEQUENCE)
    return with_rewards(without_mtp(base), **{"group": 4, "prompt": 6, "completion": 10} | keys)


@cache
def trained(segments: Segments, pp: int, ep: int, dp: int, zero: int) -> dict[str, Rows]:
    """The rows of a plan's steps by model. Each rollout is used for two steps, with a reference policy."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for model in MODELS:
            policy_spec = rewarded(model, pp, ep, dp, zero, iterations=2, kl=0.1)
            write_build(folder / "builds" / model, compile_spec(policy_spec, segments=segments).files)
        run_module("tests.runtime.rl.learning", folder, pp * dp, str(STEPS))
        texts = {model: (folder / "out" / f"{model}.jsonl").read_text() for model in MODELS}
    return {model: [json.loads(line) for line in text.splitlines()] for model, text in texts.items()}


@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_has_the_same_steps(segments: Segments, plan: tuple[int, int, int, int]) -> None:
    """The first completions are bit-identical, and what is learnt from them differs only by the order of sums."""
    alone = trained(segments, *PLANS[0])
    for model, rows in trained(segments, *plan).items():
        assert [row["completions"] for row in rows[:2]] == [row["completions"] for row in alone[model][:2]]
        for row, expected in zip(rows[:2], alone[model], strict=False):
            for name in ("loss", "grad_norm", "reward", "entropy", "policy_kl", "reference_kl", "completion_tokens"):
                assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (model, name)


def test_steps_on_the_same_completions(segments: Segments) -> None:
    """The weights of the second step differ from those that generated, whose probabilities stay the old ones."""
    for rows in trained(segments, *PLANS[0]).values():
        first, second, third, _ = rows
        assert first["completions"] == second["completions"] != third["completions"]
        assert first["policy_kl"] == first["reference_kl"] == 0 < third["reference_kl"]
        assert second["policy_kl"] > 0 == third["policy_kl"] and second["reference_kl"] > 0
        assert first["reward"] == second["reward"] and first["entropy"] == second["entropy"] > 0


def test_rows_describe_the_completions(segments: Segments) -> None:
    for rows in trained(segments, *PLANS[0]).values():
        for row in rows:
            completions = [[token for token in tokens_C if token >= 0] for tokens_C in row["completions"]]
            longest = [len(completion) == 10 for completion in completions]
            small = [np.mean([token < 15 for token in completion]) for completion in completions]
            assert row["completion_tokens"] == np.mean([len(completion) for completion in completions])
            assert row["completion_longest"] == np.mean(longest)
            assert all(
                END not in completion[:-1] and (completion[-1] == END or len(completion) == 10)
                for completion in completions
            )
            assert row["reward"] == pytest.approx(np.mean(small)) and row["rewards"] == {"right": row["reward"]}


def test_the_reward_rises(tmp_path: Path, segments: Segments) -> None:
    """Completions come to have the rewarded tokens."""
    write_build(tmp_path / "build", compile_spec(rewarded("llama", steps=30), segments=segments).files)
    rows = steps(learning(Build.open(tmp_path / "build"), 0, Board(1).bind(0)), 30)
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2, rewards


def test_a_bit_that_differs_ends_the_run(tmp_path: Path, segments: Segments) -> None:
    write_build(tmp_path / "build", compile_spec(rewarded("llama"), segments=segments).files)
    trainer = learning(Build.open(tmp_path / "build"), 0, Board(1).bind(0))
    trainer.train_step()
    policy = trainer.policy
    assert policy is not None
    generate = policy.generator.generate

    def changed(*args: Any) -> Any:
        rollouts = generate(*args)
        rollouts.logp_NC[3, 0] = np.nextafter(np.float32(rollouts.logp_NC[3, 0]), np.float32(0))
        return rollouts

    policy.generator.generate = changed  # type: ignore[method-assign]
    before = {bucket.name: bucket.parameters.clone() for bucket in trainer.state.buckets}
    with pytest.raises(RolloutError, match=r"1 of [\d,]+ log-probabilities of generation have other bits in training"):
        trainer.train_step()
    assert all(before[bucket.name].equal(bucket.parameters) for bucket in trainer.state.buckets), "nothing is learnt"
