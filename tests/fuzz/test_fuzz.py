"""A thousand inputs of the fuzzer, each held to its work and memory, and every input that ever failed.

A million: `make soak`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz.generate import KINDS, from_json, generated
from tests.fuzz.judge import judged
from tests.fuzz.run import FOUND

ROOT = Path(__file__).parents[2]
COUNT = 1_000


def test_inputs_end_in_messages_or_specs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.run", "--count", str(COUNT), "--keep", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.endswith(f"{COUNT:,} inputs, 0 failed\n")
    kinds = {
        kind: (int(tried), int(right))
        for kind, tried, right in re.findall(r"(\w+) (\d+) \((\d+) right\)", process.stdout)
    }
    assert set(kinds) == set(KINDS) and min(tried for tried, _ in kinds.values()) > COUNT / len(KINDS) / 2
    assert sum(right for _, right in kinds.values()) > COUNT / 50, "too few inputs are specs"
    codes = re.findall(r"(E\d{4}) \d+", process.stdout)
    assert len(codes) > 50, "too few rules are met"


def test_earlier_findings_stay_fixed() -> None:
    for path in sorted(FOUND.glob("*.json")):
        judged(from_json(path.read_text("utf-8")))


def test_a_seed_gives_one_input() -> None:
    for seed in range(50):
        assert generated(seed) == generated(seed) == from_json(generated(seed).to_json())
    assert len({generated(seed).to_json() for seed in range(200)}) > 190


def test_the_judge_finds_a_slow_and_a_large_and_a_crashing_reader(tmp_path: Path) -> None:
    """Mutants of the resolver: the fuzzer must fail on each, and keep the input."""
    mutants = {
        "hang": "judge.HANG_S = 2\ndef parse(source):\n    while True: pass\n",
        "slow": (
            "judge.CALLS, judge.COUNTED_S = 100_000, 0.01\ndef call(): pass\n"
            "def parse(source):\n    for _ in range(20 * judge.CALLS): call()\n    return syntax.parse(source)\n"
        ),
        "crash": "def parse(source):\n    raise KeyError('x')\n",
        "memory": "def parse(source):\n    return [0] * (1 << 27)\n",
    }
    reasons = {
        "hang": "2 s of the processor",
        "slow": "calls of functions",
        "crash": "KeyError",
        "memory": "MemoryError",
    }
    for name, code in mutants.items():
        program = (
            "import sys\nfrom tests.fuzz import judge, run\n"
            "import dsl.text.parser as syntax\nimport dsl.resolve.files as files\n"
            f"{code}\nreal = judge.judged\ndef warm(given):\n    run.judged = late\n    return real(given)\n"
            "def late(given):\n    files.parse = parse\n    return real(given)\nrun.judged = warm\n"
            f"sys.argv = ['run', '--count', '1', '--start', '1', '--keep', {str(tmp_path / name)!r}]\n"
            "sys.exit(run.main())"
        )
        process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
        assert process.returncode == 1, process.stdout + process.stderr
        assert "1 inputs, 1 failed" in process.stdout and reasons[name] in process.stdout
        (input_file,) = (tmp_path / name).glob("*.json")
        assert from_json(input_file.read_text("utf-8")) == generated(1)
