"""Every laptop spec is compiled and trained for some steps by `dsc train`, as a newcomer would."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests import copies, forks
from tests.specs.shipped import SPECS, shipped

LAPTOP = ("tiny", "quickstart", "laptop-gqa", "laptop-v2", "laptop-hybrid", "laptop-v4")
CORPUS = ("bisect", "contextlib", "copy", "fnmatch", "heapq", "shlex", "string", "textwrap", "argparse", "ast", "cmd")
STEPS = 3


def trained(name: str, folder: Path, *words: str) -> list[dict[str, Any]]:
    """The steps of a run of a shipped spec with another text: some files of the standard library, and a tokenizer
    trained on them."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for module in CORPUS:
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py", corpus)
    command = ["train", str(SPECS / f"{name}.dsc"), "--data", str(folder), "--out", "run", *words]
    command += ["-s", f"data.source={corpus}/*.py", "-s", "data.tokenizer=train(300)"]
    process = forks.run("compiler.cli.main", command, folder)
    assert process.returncode == 0, process.stdout + process.stderr
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_every_phase_trains(tmp_path: Path) -> None:
    """One step each, with equally many tokens."""
    rows = trained("laptop-long", tmp_path, "-s", "train.steps=1", "-s", "train.rate=constant at 1e-3")
    assert [(row["step"], row["phase"], row["tokens"]) for row in rows] == [(1, 1, 2048), (2, 2, 4096), (3, 3, 6144)]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)


def test_both_phases_of_sparse_attention_train(tmp_path: Path) -> None:
    """One step each: first only the indexers, then everything."""
    rows = trained("laptop-v32", tmp_path, "-s", "train.steps=1", "-s", "train.rate=constant at 1e-3")
    assert [(row["step"], row["phase"]) for row in rows] == [(1, 1), (2, 2)]
    assert all(row["index_loss"] > 0 for row in rows) and rows[0]["grad_norm"] < rows[1]["grad_norm"] / 10


@pytest.mark.parametrize("name", LAPTOP)
def test_trains(name: str, tmp_path: Path) -> None:
    rows = trained(name, tmp_path, "--steps", str(STEPS))
    spec = shipped(f"{name}.dsc")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["loss"] == pytest.approx(math.log(spec.model.vocab), abs=0.3), "nothing is known yet"
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert len({row["loss"] for row in rows}) == STEPS
    assert (tmp_path / "run" / "report.html").is_file()


def test_fine_tuning_and_rewards_train(tmp_path: Path) -> None:
    """The second run starts from the weights of the first; its completions are scored."""
    copies.copy(SPECS / "r1-tiny.dsc", tmp_path)
    copies.copytree(SPECS / "r1-tiny", tmp_path / "r1-tiny")
    rows = {}
    for run in ("r1_sft", "r1"):
        words = ["train", f"r1-tiny.dsc:{run}", "--steps", str(STEPS), "-s", 'train.initial="runs/r1_sft"']
        process = forks.run("compiler.cli.main", words[: None if run == "r1" else -2], tmp_path)
        assert process.returncode == 0, process.stdout + process.stderr
        rows[run] = [json.loads(line) for line in (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    assert rows["r1_sft"][0]["loss"] == pytest.approx(math.log(20), abs=0.3)
    assert len(rows["r1"]) == STEPS
    for row in rows["r1"]:
        assert row["reward"] == row["rewards"]["right"] + 0.2 * row["rewards"]["form"] and row["policy_kl"] == 0
        assert (0 < row["entropy"] <= math.log(20) and row["grad_norm"] > 0) or row["reward_alike"] == 1


def test_the_files_of_r1_tiny_equal_the_output_of_its_script(tmp_path: Path) -> None:
    copies.copy(SPECS / "r1-tiny" / "sums.py", tmp_path)
    runpy.run_path(str(tmp_path / "sums.py"), run_name="__main__")
    names = sorted(path.name for path in (SPECS / "r1-tiny").iterdir() if path.is_file())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert all((tmp_path / name).read_bytes() == (SPECS / "r1-tiny" / name).read_bytes() for name in names)
