"""Rewards that are code: functions in TRL's convention, expressions, and how failures are reported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.contract import RewardRecipe
from runtime.data.rewards import scoring, worker
from runtime.data.rewards.scoring import Case, RewardError, Rewards
from runtime.system.limited import DeadError, FaultError, LimitedProcess
from tests.progress import PATIENCE_S
from tests.runtime.processes import wait_for

CASES = [Case("1 + 1 =", "\\boxed{2}", {"answer": "2", "level": 1}), Case("2 + 2 =", "5", {"answer": 4, "tags": ["a"]})]
LENGTHS = "def reward(prompts, completions, **columns):\n    return [len(each) for each in completions]\n"


def function(name: str = "own", seconds: float = PATIENCE_S, **more: Any) -> RewardRecipe:
    return RewardRecipe(name, "python", 1.0, file=f"rewards/{name}.py", seconds=seconds, **more)


@contextmanager
def started(text: str, **more: Any) -> Iterator[Rewards]:
    with Rewards((function(**more),), {"own": text}) as rewards:
        yield rewards


def refusal(text: str, cases: list[Case] = CASES, **more: Any) -> str:
    with pytest.raises(RewardError) as caught, started(text, **more) as rewards:
        rewards.score(cases)
    return str(caught.value)


# ---------------------------------------------------------------- scores


def test_all_checks_score_all_cases(tmp_path: Path) -> None:
    file = tmp_path / "lengths.py"
    file.write_text(LENGTHS, "utf-8")
    named = (
        RewardRecipe("right", "exact", 1.0),
        RewardRecipe("shape", "format", 0.5),
        RewardRecipe("digit", "regex", 0.1, pattern=r"^\d$"),
        function("length"),
    )
    with Rewards(named, {"length": file}) as rewards:
        cases = [*CASES, Case("", "<think></think><answer>4</answer>", {"answer": 4.0})]
        scores = rewards.score(cases)
        assert scores.dtype == np.float64
        assert scores.tolist() == [[1, 0, 0, 9], [0, 0, 1, 1], [1, 1, 0, 33]]
        assert rewards.score([]).shape == (0, 4)
        assert np.array_equal(rewards.score(cases[::-1]), scores[::-1])


def test_a_function_is_called_as_trl_calls_it() -> None:
    """Columns are lists with one entry for each completion, None where a row has none."""
    text = """
def reward(prompts, completions, answer, level, tags, **columns):
    assert prompts == ["1 + 1 =", "2 + 2 ="] and completions == ["\\\\boxed{2}", "5"], (prompts, completions)
    assert (answer, level, tags, columns) == (["2", 4], [1, None], [None, ["a"]], {}), (answer, level, tags, columns)
    yield 1
    yield 0.1
"""
    with started(text) as rewards:
        assert rewards.score(CASES).tolist() == [[1.0], [0.1]]


def test_where_rows_have_messages_so_has_the_function() -> None:
    text = """
def reward(prompts, completions, **_):
    return [len(c[0]["content"]) + len(p) for p, c in zip(prompts, completions)]
"""
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    with started(text) as rewards:
        assert rewards.score([Case("<x><y>", "abc", {}, messages)]).tolist() == [[5.0]]


def test_numbers_of_libraries_are_numbers() -> None:
    text = "import numpy as np\ndef reward(completions, **_): return np.array([len(c) for c in completions]) / 3"
    with started(text) as rewards:
        assert rewards.score(CASES)[:, 0].tolist() == [9 / 3, 1 / 3]


def test_messages_use_the_file_name_of_the_spec() -> None:
    assert refusal("def reward(**_):\n    return 1\n", named="mine/own.py").startswith("reward `own`: mine/own.py: ")


def test_output_of_a_function_does_not_change_its_answers() -> None:
    text = """
import os, subprocess, sys
print('{"values": [7, 7]}', flush=True)
def reward(completions, **_):
    print('{"values": [8, 8]}', flush=True)
    os.write(1, b'{"values": [9, 9]}\\n' * 10_000)
    print("x" * 1_000_000, file=sys.stderr)
    subprocess.run([sys.executable, "-c", "print('{}')"])
    return [len(sys.stdin.read()), 1]
"""
    with started(text) as rewards:
        assert rewards.score(CASES).tolist() == rewards.score(CASES).tolist() == [[0.0], [1.0]]


def test_large_questions_are_answered() -> None:
    cases = [Case("p" * 100_000, f"{number}" * 50_000, {"answer": "é" * 1000}) for number in range(100, 200)]
    with started(LENGTHS) as rewards:
        assert (rewards.score(cases) == 150_000).all()


def test_the_environment_is_clean_and_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    (tmp_path / "beside.py").write_text("SEVEN = 7", "utf-8")
    file = tmp_path / "own.py"
    file.write_text(
        """
import os, sys
import beside
found = [float(name in os.environ) for name in ("SECRET_KEY", "PATH")]
found += [float("torch" in sys.modules), float(os.environ["CUDA_VISIBLE_DEVICES"] == ""), beside.SEVEN]
found += [float(os.path.samefile(".", os.path.dirname(__file__)))]
def reward(completions, **_):
    return found
""",
        "utf-8",
    )
    with Rewards((function(),), {"own": file}) as rewards:
        assert rewards.score([CASES[0]] * 6)[:, 0].tolist() == [0, 1, 0, 1, 7, 1]


def test_limits_cannot_be_raised_and_the_parent_has_a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    text = """
import os, resource
def reward(completions, **_):
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            has_key = b"SECRET_KEY" in file.read()
    except PermissionError:
        has_key = False
    return [*resource.getrlimit(resource.RLIMIT_DATA), has_key]
"""
    with started(text) as rewards:
        assert rewards.score([CASES[0]] * 3)[:, 0].tolist() == [scoring.DATA_BYTES, scoring.DATA_BYTES, 0]


def test_a_forked_child_does_not_answer() -> None:
    text = "import os\ndef reward(completions, **_):\n    os.fork() and os.wait()\n    return [1, 2]\n"
    with started(text) as rewards:
        assert [rewards.score(CASES)[:, 0].tolist() for _ in range(3)] == [[1, 2]] * 3


def test_the_trainer_does_not_import_reward_functions() -> None:
    code = (
        "import sys, runtime.data.rewards.scoring; sys.exit(bool({'torch', 'reward', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rewards_are_computed_at_the_same_time(tmp_path: Path) -> None:
    """The first rewards cannot answer before the last ones are called: opening a pipe waits for the other end."""
    text = "def reward(completions, **_):\n    open({!r}, {!r}).close()\n    return [1] * len(completions)"
    files = {}
    for name, index, mode in [*((f"r{i}", i, "r") for i in range(3)), *((f"r{5 - i}", i, "w") for i in (2, 1, 0))]:
        if mode == "r":
            os.mkfifo(tmp_path / f"pipe{index}")
        files[name] = tmp_path / f"{name}.py"
        files[name].write_text(text.format(f"pipe{index}", mode), "utf-8")
    with Rewards(tuple(map(function, files)), files) as rewards:
        assert (rewards.score(CASES) == 1).all()


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [1.0]", "`reward` returns 1 values for 2 completions\n = hint: return a number for each completion"),
        ("return [1, float('nan')]", "`reward` returns nan for completion 1, which is no number from -1e+30 to 1e+30"),
        ("return [float('inf'), 1]", "`reward` returns inf for completion 0"),
        ("return [None, 1]", "`reward` returns None for completion 0"),
        ("return ['1', 1]", "`reward` returns '1' for completion 0"),
        ("return 1.0", "`reward` returns no list, but float\n = hint: return a list of numbers"),
        ("return 'ab'", "`reward` returns no list, but str"),
        ("return 1e300, 1", "returns 1e+300 for completion 0, which is no number from"),
        ("completions.pop(); return [1.0]", "`reward` returns 1 values for 2 completions"),
        ("return 10 ** 400, 1", "for completion 0, which is no number from -1e+30 to 1e+30"),
        (
            "raise ValueError('no\\x1b[31m luck')",
            ":2: `reward` fails: ValueError: no\\x1b[31m luck\n = hint: correct it",
        ),
        ("return [helper(x) for x in completions]", ":2: `reward` fails: NameError: name 'helper' is not defined"),
        ("import sys; sys.exit(0)", ":2: `reward` fails: SystemExit: 0"),
        ("return reward(prompts, completions)", "`reward` fails: RecursionError"),
        ("import os; os._exit(3)", "its process ended with code 3"),
        ("import os; print('last words', flush=True); os._exit(0)", "its process ended with code 0: last words"),
        ("import os; os.kill(os.getpid(), 11)", "its process was killed by SIGSEGV"),
        ("return [bytearray(1 << 33)]", "it needs more than 4 GiB of memory"),
    ],
)
def test_errors_name_the_reward_and_the_place(body: str, said: str) -> None:
    message = refusal(f"def reward(prompts, completions, **_):\n    {body}\n")
    assert message.startswith("reward `own`: ") and said in message and "\n = hint: " in message
    assert message.startswith("reward `own`: rewards/own.py:") or "memory" in said


def test_only_finite_bounded_numbers_are_accepted() -> None:
    """The bound itself is valid, with either sign; the message has the first invalid number, shortened."""
    assert worker._numbers([worker.MAX_REWARD, -worker.MAX_REWARD, True, np.float32(0.5)], 4, "who") == [
        1e30,
        -1e30,
        1.0,
        0.5,
    ]
    above = float(np.nextafter(worker.MAX_REWARD, np.inf))
    wrong = {above: repr(above), -above: repr(-above), "1": "'1'", b"1": "b'1'", (): "()", None: "None"}
    wrong |= {10**400: "1" + 79 * "0", "x" * 78: repr("x" * 78), "x" * 90: "'" + 79 * "x", float("nan"): "nan"}
    for value, text in wrong.items():
        message = f"who returns {text} for completion 1, which is no number from -1e+30 to 1e+30"
        with pytest.raises(FaultError) as caught:
            worker._numbers([0.0, value, "no"], 3, "who")
        assert str(caught.value) == message
    for count in (1, 3):
        with pytest.raises(FaultError, match=f"who returns 2 values for {count} completions"):
            worker._numbers([0.0, 1.0], count, "who")


def test_patterns_are_searched_for_in_each_completion() -> None:
    score = worker._score_of({"pattern": "b$"})
    assert score({"completions": ["ab", "ba", "", "b"]}) == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def reward(:\n", "rewards/own.py:1:12: cannot be imported: invalid syntax"),
        ("import nowhere_to_be_found\n", "rewards/own.py:1: cannot be imported: ModuleNotFoundError: No module named"),
        ("raise SystemExit\n", "rewards/own.py:1: cannot be imported: SystemExit"),
        ("def score(completions, **_): ...\n", 'has no function `reward`\n = hint: write `function = "score"`'),
        ("reward = 3\n", "has no function `reward`\n = hint: write `def reward` there"),
        (
            "def reward(completions): return []\n",
            "`reward` does not accept its arguments, answer, level, tags, prompts, completions: got an unexpected "
            "keyword argument 'answer'\n = hint: write `def reward(prompts, completions, **columns)`",
        ),
        ("def reward(completions, price, **_): return []\n", "missing a required argument: 'price'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(text: str, said: str) -> None:
    message = refusal(text)
    assert message.startswith("reward `own`: rewards/own.py:") and said in message


@pytest.mark.parametrize(
    "body",
    ["while True: pass", "import signal; signal.pause()", "import re; re.search('(a+)+$', 'a' * 40 + 'b')"],
)
def test_a_function_that_runs_too_long_is_ended(body: str) -> None:
    message = refusal(f"def reward(prompts, completions, **_):\n    {body}\n", seconds=0.5)
    assert message == (
        "reward `own`: rewards/own.py: takes more than 0.5 s for 2 completions\n"
        " = hint: make it quicker, or write `seconds = 1`"
    )


def test_an_import_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "START_S", 0.5)
    assert "takes more than 0.5 s to be imported" in refusal("while True: pass")


def test_a_pattern_that_backtracks_without_end_is_ended() -> None:
    reward = RewardRecipe("shape", "regex", 1.0, pattern="(a+)+$", seconds=PATIENCE_S)
    with Rewards((reward,), {}) as rewards:
        assert rewards.score([Case("", "caaa", {}), Case("", "ab", {})]).tolist() == [[1], [0]]
    message = r"reward `shape`: pattern '\(a\+\)\+\$': takes more than 0\.5 s for 1 compl"
    with Rewards((replace(reward, seconds=0.5),), {}) as rewards, pytest.raises(RewardError, match=message):
        rewards.score([Case("", "a" * 40 + "b", {})])


def test_an_invalid_pattern_is_refused() -> None:
    with pytest.raises(RewardError, match=r"reward `shape`: the pattern is no regular expression: .*position 0"):
        Rewards((RewardRecipe("shape", "regex", 1.0, pattern="(a"),), {})


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read: No such file"), (b"\xff", "not UTF-8")])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "own.py"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RewardError) as caught:
        Rewards((function(),), {"own": path})
    assert str(caught.value).startswith(f"reward `own`: {path}: {said}")


def test_a_row_without_an_answer_is_refused_by_exact() -> None:
    with Rewards((RewardRecipe("right", "exact", 1.0),), {}) as rewards, pytest.raises(RewardError) as caught:
        rewards.score([CASES[0], Case("", "x", {"label": 3})])
    assert "reward `right`: " in str(caught.value) and 'answer = "solution"' in str(caught.value)


# ---------------------------------------------------------------- the end


# A boundary is the rule; without one, a process outside has to find those that left their session and their parent.
NO_BOUNDARY = "from runtime.system import kernel; kernel.drop_capabilities(); kernel.refuse_calls()"
IN = pytest.mark.parametrize("first", ["", NO_BOUNDARY], ids=["behind a boundary", "without one"])

# One process in the session of the function, and one that left the session and its parent.
STARTS = """
import os, subprocess
AWAY = "import subprocess; subprocess.Popen(['sleep', 'SECONDS'], stdout=2, start_new_session=True)"
def reward(completions, **_):
    subprocess.run(["python3", "-c", AWAY], check=True)
    subprocess.Popen(["sleep", "SECONDS"])
    return [1, 2]
"""


def marked() -> tuple[str, str]:
    """Return STARTS with a number of seconds that no other process has, and the number."""
    seconds = f"600.{os.getpid()}{time.monotonic_ns()}"
    return STARTS.replace("SECONDS", seconds), seconds


def sleeping(seconds: str) -> list[int]:
    """Return the processes of `sleep` with this argument, as this process sees them."""
    pids = []
    for folder in Path("/proc").glob("[1-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                pids.append(int(folder.name))
    return pids


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)


def both_run(seconds: str) -> None:
    """Wait for the two processes: one of them may not have executed `sleep` yet when the function returns."""
    wait_for(lambda: len(sleeping(seconds)) == 2, "the processes that a reward has started")


def all_end(seconds: str) -> None:
    wait_for(lambda: not sleeping(seconds), "the end of the processes that a reward has started")


@IN
def test_processes_started_by_a_function_end_with_it(first: str) -> None:
    text, seconds = marked()
    code = f"""
{first}
from tests.runtime.data.rewards.test_scoring import CASES, both_run, started
with started({text!r}) as rewards:
    rewards.score(CASES)
    both_run({seconds!r})
rewards.close()  # once more
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    all_end(seconds)


def test_a_process_that_has_ended_leaves_no_open_files() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    process = LimitedProcess("runtime.none", 1 << 30)
    with pytest.raises(DeadError, match=r"^its process ended with code 1: .*No module named runtime\.none$"):
        process.answer({}, PATIENCE_S)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@IN
def test_reward_processes_end_if_the_trainer_is_killed(first: str) -> None:
    text, seconds = marked()
    code = f"""
{first}
import os
from tests.runtime.data.rewards.test_scoring import CASES, both_run, started
with started({text!r}) as rewards:
    rewards.score(CASES)
    both_run({seconds!r})
    print("both run", flush=True)
    os.kill(os.getpid(), 9)
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (-9, "both run\n"), done.stderr
    all_end(seconds)


@IN
@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("os._exit(3)", "ended with code 3"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("raise ValueError", "ValueError"),
    ],
)
def test_processes_started_by_a_function_end_if_it_crashes(last: str, said: str, first: str) -> None:
    text, seconds = marked()
    text = text.replace("return [1, 2]", last)
    done = python(f"{first}\nfrom tests.runtime.data.rewards.test_scoring import refusal\nprint(refusal({text!r}))")
    assert said in done.stdout, done.stdout + done.stderr
    all_end(seconds)


def test_the_function_of_the_documentation_scores() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reinforcement.md").read_text("utf-8")
    text = page.partition("```python\n")[2].partition("```")[0]
    with started(text, function="short") as rewards:
        assert rewards.score([*CASES, Case("", "x" * 200, {"answer": ""})]).tolist() == [[1], [1], [0]]
