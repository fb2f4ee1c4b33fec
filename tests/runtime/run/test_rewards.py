"""Runs that learn from rewards: their output, a kill and a resume, and rewards that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from compiler.plan.read_files import load_with_files
from runtime.system import boundary
from tests.runtime.data.chats import CHATML, said, write_model
from tests.runtime.data.rewards.test_scoring import NO_BOUNDARY
from tests.runtime.processes import wait_for
from tests.runtime.run.place import Place, bits, saved, untimed

SPEC = """
run {name} {{
  model = tiny, cluster = here, precision = fp32
  parallel {{ pipeline = {pipeline}, expert = 1, data = auto, zero = {zero} }}
  schedule {{ name = {schedule} }}
  train {{
    sequence = 48, micro_batch = 4, batch = 16, steps = {steps}
    optimizer adamw {{ weight_decay = 0.0, clip = 1.0 }}
    rate {{ constant at 1e-3 }}
    seed = 1
    checkpoint {{ every = 3 steps, keep = 100 }}
    grpo {{
      group = 4, prompt = 30, completion = 10, iterations = 2, kl = 0.01
      rewards {{
        right {{ check = exact }}
        short {{ check = python, file = "{reward}", function = "short", weight = 0.5, seconds = {seconds} }}
      }}
    }}
  }}
  data {{ source = "sums/*.jsonl", tokenizer = "model/tokenizer.json", validation = 0%, prompts {{ }} }}
}}
cluster here {{ nodes = 1, node {{ devices = {devices}, device cpu {{ cores = 1, memory = 4GB }} }} }}
model tiny {{
  vocab = 400, hidden = 16, init_std = 0.02, norm_eps = 1e-6
  attention gqa {{ heads = 4, kv_heads = 2, head_dim = 4, rope {{ theta = 10_000 }} }}
  layers 0..1 {{ ffn dense {{ inner = 32 }} }}
}}
"""
ALONE = dict(name="sums", pipeline=1, zero=0, schedule="1f1b", steps=8, devices=1, reward="short.py", seconds=200)
REWARD = """
def short(prompts, completions, answer, **columns):
    assert all(prompt[-1]["content"].endswith("?") for prompt in prompts) and all(answer)
    return [-len(completion[0]["content"]) / 100 for completion in completions]
"""


def written(place: Place, **settings: object) -> Path:
    values = ALONE | settings
    path = place.folder / f"{values['name']}.dsc"
    path.write_text(SPEC.format(**values), "utf-8")
    return path


def compiled(place: Place, **settings: object) -> None:
    spec = load_with_files(written(place, **settings))
    write_build(place.folder / "build" / spec.name, compile_spec(spec, segments=place.segments).files)


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    place = new_place()
    write_model(place.folder / "model", CHATML)
    (place.folder / "sums").mkdir()
    rows = [{"prompt": [said("user", f"{a} and {b}?")], "answer": str(a + b)} for a in range(6) for b in range(5)]
    (place.folder / "sums" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (place.folder / "short.py").write_text(REWARD, "utf-8")
    compiled(place)
    place.dsc("train", "sums.dsc", "--out", "straight")
    return place


def test_rows_have_the_values_of_rewards(place: Place) -> None:
    rows = untimed(place.folder / "straight")
    assert len(rows) == 8
    for row in rows:
        assert row["reward"] == pytest.approx(row["rewards"]["right"] + 0.5 * row["rewards"]["short"])
        assert 0 < row["completion_tokens"] <= 10 and 0 <= row["completion_longest"] <= 1 and row["entropy"] > 0
    assert [row["policy_kl"] > 0 for row in rows] == [False, True] * 4, "each rollout is trained on twice"
    assert rows[0]["reference_kl"] == 0 and all(row["reference_kl"] > 0 for row in rows[1:])


def test_a_kill_leaves_no_trace(place: Place) -> None:
    """Checkpoints are between rollouts: of step 4, since step 3 is in the middle of one, and of steps 6 and 8."""
    run = place.folder / "killed"
    with place.started("train", "sums.dsc", "--out", "killed") as running:
        wait_for(lambda: (run / "checkpoints" / "step-00000004").is_dir(), "the checkpoint of step 4")
        for pid in running.seen():
            with suppress(ProcessLookupError):  # a reward's process, which ends with its rank
                os.kill(pid, signal.SIGKILL)
    done = place.dsc("train", "sums.dsc", "--out", "killed", "--resume")
    assert "not bit for bit" not in done.stdout + done.stderr
    assert untimed(run) == untimed(place.folder / "straight")
    assert bits(saved(run, 8)) == bits(saved(place.folder / "straight", 8))
    names = sorted(path.name for path in (place.folder / "straight" / "checkpoints").glob("step-*"))
    assert [int(name.removeprefix("step-")) for name in names] == [4, 6, 8]


def test_a_run_ends_after_all_steps_of_a_rollout(place: Place) -> None:
    place.dsc("train", "sums.dsc", "--out", "three", "--steps", 3)
    assert len(untimed(place.folder / "three")) == 4
    done = place.dsc("train", "sums.dsc", "--out", "three", "--resume")
    assert "not bit for bit" not in done.stdout + done.stderr
    assert bits(saved(place.folder / "three", 8)) == bits(saved(place.folder / "straight", 8))


def test_other_plans_have_the_same_completions(place: Place) -> None:
    settings = [dict(name="data", devices=2, zero=1), dict(name="pipeline", devices=2, pipeline=2, schedule="zbv")]
    alone = untimed(place.folder / "straight")[0]
    for changes in settings:
        compiled(place, **changes)
        place.dsc("train", f"{changes['name']}.dsc", "--out", changes["name"], "--steps", 2)
        first = untimed(place.folder / str(changes["name"]))[0]
        assert {name: first[name] for name in ("reward", "rewards", "completion_tokens", "entropy")} == {
            name: alone[name] for name in ("reward", "rewards", "completion_tokens", "entropy")
        }
        assert first["loss"] == pytest.approx(alone["loss"], abs=1e-6)
        assert first["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("    return [1.0]", "returns 1 values for 8 completions"),
        ("    return [columns['level']]", "KeyError: 'level'"),
        ("    while True: pass", "3 s"),
        ("    import os; os._exit(3)", "ended"),
    ],
)
def test_a_reward_that_fails_ends_the_run(place: Place, text: str, message: str) -> None:
    (place.folder / "wrong.py").write_text(f"def short(prompts, completions, **columns):\n{text}\n", "utf-8")
    compiled(place, name="wrong", reward="wrong.py", devices=2, seconds=3 if "while" in text else 200)
    done = place.dsc("train", "wrong.dsc", "--out", f"wrong{len(text)}", code=1)
    assert "reward `short`: wrong.py:" in done.stderr and message in done.stderr, done.stderr


def boundary_event(run: Path) -> dict[str, Any]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]
    (found,) = [event for event in events if event["event"] == "boundary"]
    assert isinstance(found, dict)
    return found


def test_a_run_tells_whether_functions_have_a_boundary(place: Place) -> None:
    """Without one, it warns at the start. The same completions have the same rewards."""
    reason = boundary.problem()
    event = boundary_event(place.folder / "straight")
    assert event.pop("time") and event == {"event": "boundary", "rank": 0, "is_closed": not reason, "reason": reason}
    command = "from compiler.cli.main import main\nimport sys; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{NO_BOUNDARY}\n{command}", "train", "sums.dsc", "--out", "open", "--steps", "2"],
        cwd=place.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rewards: warning: your Python functions have the rights of this run: no boundary: unshare" in done.stderr
    event = boundary_event(place.folder / "open")
    assert not event["is_closed"] and event["reason"].startswith("unshare: Operation not permitted")
    assert untimed(place.folder / "open")[0]["rewards"] == untimed(place.folder / "straight")[0]["rewards"]


def test_a_step_is_trained_again(place: Place) -> None:
    """A replay uses the recorded completions, from the checkpoint before the step."""
    output = place.dsc("replay", "straight", 7).stdout
    assert "equal to the run, bit for bit" in output


def test_ops_of_torch_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of their rows depend on the other rows."""
    monkeypatch.setenv("DSC_OPS", "torch")
    done = place.dsc("train", "sums.dsc", "--out", "torch", code=2)
    assert "error: generating completions needs the C++ ops: DSC_OPS is torch" in done.stderr


def test_the_report_and_dsc_watch_show_rewards(place: Place) -> None:
    page = (place.folder / "straight" / "report.html").read_text("utf-8")
    for title in ("Reward", "Tokens per completion", "Entropy of the sampling distribution", "Divergence from the"):
        assert title in page
    assert "Loss of the main head" not in page and "Policy loss" in page
    output = place.dsc("watch", "straight").stdout
    assert "reward" in output and "entropy" in output
