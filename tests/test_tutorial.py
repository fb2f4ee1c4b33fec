"""The tutorial, executed: its commands run in order and show the output on the page."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path

import pytest

from dsl.load import load
from tests.typed import FENCE, ROOT, environment, steps, type_in

PAGE = (ROOT / "docs" / "tutorial.md").read_text("utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A newcomer's home folder after all steps of the page."""
    home = tmp_path_factory.mktemp("home")
    type_in(steps(PAGE), home, environment(home))
    return home


def test_the_model_learns(home: Path) -> None:
    """Numbers on the page: where the loss starts, and that validation is better than the unigram loss at once."""
    folder = home / "first" / "runs" / "first"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 121))
    assert abs(rows[0]["loss"] - math.log(2048)) < 0.3
    validations = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert sorted(validations) == [30, 60, 90, 120]
    (meta,) = folder.glob("data/*/meta.json")
    unigram = json.loads(meta.read_text("utf-8"))["unigram_nats"]
    assert validations[60] < unigram - 0.3
    assert validations[120] < min(validations[60], unigram - 0.6)
    assert max(row["imbalance"] for row in rows[-20:]) < max(row["imbalance"] for row in rows[:20])


def test_described_files_exist(home: Path) -> None:
    folder = home / "first"
    assert (folder / "build" / "first" / "stages" / "rank_0.py").read_text("utf-8").count("def ") > 1
    assert "<svg" in (folder / "runs" / "first" / "report.html").read_text("utf-8")
    assert list((folder / "runs" / "first" / "checkpoints" / "step-00000120").glob("*.safetensors"))
    spec = (folder / "qwen.dsc").read_text("utf-8")
    assert "# `attention_dropout` = 0.1: dropout; a spec has none; lost here\n" in spec


def test_the_largest_import_has_the_stated_size() -> None:
    spec = load(ROOT / "tests" / "compiler" / "tools" / "importers" / "specs" / "deepseek-v3.dsc")
    assert "671B parameters get 1,024 GPUs" in PAGE and spec.cluster.world == 1024


def test_the_page_installs_as_the_makefile_does() -> None:
    """The test runs in the environment that these lines have made."""
    (install,) = (block[3] for block in FENCE.finditer(PAGE) if block[1] == "sh")
    command = ["make", "--dry-run", "--always-make", ".venv/.installed", "PIP=pip install -c constraints.txt"]
    makefile = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"python3 -m venv \S+|pip install [^;&]+", makefile)
    expected = [line.strip().replace("./.venv", ".venv") for line in commands]
    assert [line for line in install.splitlines() if not line.startswith(". ")] == expected


def test_every_command_of_the_page_is_run() -> None:
    """Inline `dsc …` names options that exist; whole commands are in the blocks."""
    commands = re.findall(r"`(dsc [a-z]+)", FENCE.sub("", PAGE))
    run = {" ".join(step.command.split()[:2]) for step in steps(PAGE)}
    assert {"dsc init", "dsc check", "dsc explain", "dsc show", "dsc fmt", "dsc train", "dsc report", "dsc diff",
            "dsc import"} <= run  # fmt: skip
    assert set(commands) - run <= {"dsc lsp"}
