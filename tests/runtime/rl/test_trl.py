"""The emitted head against TRL: the loss that its trainer computes for completions, and the gradients.

trl_losses.py computed the numbers, with the versions named in the file. TRL computes advantages and log-probabilities
in FP32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.rl.policy import Scale, advantages, have_equal_rewards, token_weights, totals
from tests.compiler.model.segments.running import Result, by_segment, load
from tests.compiler.model.segments.specs import DENSE, spec
from tests.compiler.model.segments.test_segments import segment_of
from tests.runtime.rl.trl_losses import FILE, RUNS
from tests.runtime.step.specs import with_rewards

TRL = json.loads(FILE.read_text("utf-8"))
INSTALLED = Path(__file__).parents[3] / ".trl"  # installed by `make soak`
GIVEN, TOLERANCE = TRL["given"], 1e-6
IDS = [" ".join(map(str, run.values())) for run in RUNS]


def head(run: dict[str, Any], low: float = TRL["low"], high: float = TRL["high"]) -> Result:
    """The results of the emitted head for the completions of a step of this run, as one micro-batch of all tokens."""
    vocab, hidden = np.shape(GIVEN["head_VD"])
    base = spec((DENSE,), vocab=vocab, hidden=hidden, mtp=False, sequence=len(GIVEN["targets_T"]), micro_batch=1)
    keys = {"temperature": run["temperature"], "kl": run["kl"], "clip_low": low, "clip_high": high}
    keys |= {"kl_form": "corrected" if run["corrected"] else "k3"}
    segment = segment_of("head", with_rewards(base, **keys))
    lengths_N, policies = np.array(GIVEN["lengths_N"]), TRL["by_temperature"][str(run["temperature"])]
    values = {
        "h": GIVEN["hidden_TD"],
        "head": GIVEN["head_VD"],
        "targets": GIVEN["targets_T"],
        "old": policies["old_T"],
        "reference": policies["reference_T"],
        "advantage": np.repeat(advantages_of(run), lengths_N),
        "weight": np.repeat(token_weights(lengths_N, run["loss"], TRL["longest"]), lengths_N),
        "d_loss": 1.0,
        "g_head": np.zeros((vocab, hidden)),
    }
    names = {tensor.name for tensor in segment.inputs} | {"head", "d_loss", "g_head"}
    inputs = {
        name: torch.tensor(np.array(value), dtype=torch.int64 if name == "targets" else torch.float64)
        for name, value in values.items()
        if name in names
    }
    return by_segment(segment, load(segment), inputs)


def advantages_of(run: dict[str, Any]) -> np.ndarray:
    totals_N = np.array(GIVEN["rewards_NR"]) @ np.array(TRL["reward_weights"])
    return advantages(totals_N, TRL["group"], run["scale"])


@pytest.mark.parametrize("run", TRL["runs"], ids=IDS)
def test_losses_equal_trl(run: dict[str, Any]) -> None:
    result = head(run)
    assert result.outputs["loss"].item() == pytest.approx(run["value"], abs=TOLERANCE)
    logp_T = torch.tensor(TRL["by_temperature"][str(run["temperature"])]["logp_T"], dtype=torch.float64)
    torch.testing.assert_close(result.outputs["logp"], logp_T, rtol=0, atol=TOLERANCE)
    expected_VD = torch.tensor(run["d_head_VD"], dtype=torch.float64)
    torch.testing.assert_close(result.gradients["g_head"], expected_VD, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_zero_advantage(scale: Scale) -> None:
    """A mean of equal numbers is rounded: the mean of six times 0.1 is not 0.1."""
    rewards_NR = np.array([[0.1, 0.7]] * 6 + [[0.1, 0.7]] * 5 + [[0.2, 0.7]])
    totals_N = totals(rewards_NR, np.array([1.0, 0.3]))
    assert have_equal_rewards(totals_N, 6).tolist() == [True, False]
    advantages_N = advantages(totals_N, 6, scale)
    assert not np.any(advantages_N[:6]) and np.all(advantages_N[6:11] < 0) and advantages_N[11] > 0


@pytest.mark.parametrize("run", TRL["runs"], ids=IDS)
def test_advantages_equal_trl(run: dict[str, Any]) -> None:
    np.testing.assert_allclose(advantages_of(run), run["advantages_N"], rtol=0, atol=TOLERANCE)
    assert not np.any(advantages_of(run)[-TRL["group"] :]), "those of a group whose rewards are equal"


def test_all_runs_differ() -> None:
    """Losses and gradients of any two runs differ by more than the tolerance, so that mixing runs up would fail."""
    assert [{name: run[name] for name in RUNS[0]} for run in TRL["runs"]] == RUNS
    for i, run in enumerate(TRL["runs"]):
        for earlier in TRL["runs"][:i]:
            assert np.abs(np.subtract(run["d_head_VD"], earlier["d_head_VD"])).max() > 100 * TOLERANCE
    plain = TRL["runs"][0]
    for low, high in ((0.1, TRL["high"]), (TRL["low"], 0.2)):
        changed = head(plain, low, high)
        assert abs(changed.outputs["loss"].item() - plain["value"]) > 100 * TOLERANCE, (
            "ratios are clipped on both sides"
        )


def test_installed_trl_gives_the_stored_numbers(tmp_path: Path) -> None:
    assert (INSTALLED / "trl").exists(), "make .trl/.installed"
    environment = os.environ | {"PYTHONPATH": str(INSTALLED), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.runtime.rl.trl_losses", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=INSTALLED.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    numbers = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert flat(numbers) == pytest.approx(flat(TRL), rel=0, abs=TOLERANCE)


def flat(value: Any, name: str = "") -> dict[str, float]:
    """The numbers of a file, by their path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    parts = [flat(item, f"{name}.{key}") for key, item in items]
    alone = {name: value} if isinstance(value, int | float) else {}
    return {key: number for part in parts for key, number in part.items()} | alone
