"""The tutorial, executed: its commands run in order and show the output on the page.

In a ```console block, lines behind `$ ` are commands and what follows is their output: exactly, but for lines `…` that
stand for any lines. In a ```console about block, numbers may be others. A ```json block is a file, named before it.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsl.load import load
from tests import progress

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
FENCE = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`([\w/.-]+)`:\s*$")  # at the end of the text before a file
ANY_LINES = "…"
LONG_WORK = re.compile(r"^compile: .*\n", re.MULTILINE)  # said where it takes some seconds, on a busy machine
EXIT_DIFFERS = ("dsc diff", "dsc fmt --check")


@dataclass(frozen=True)
class Step:
    """A command with the output that is shown, or a file with its text."""

    command: str
    shown: tuple[str, ...]
    about: bool = False
    file: str = ""


def steps() -> list[Step]:
    found = []
    for block in FENCE.finditer(PAGE):
        kind, about, body = block[1], block[2] == "about", block[3]
        if kind == "console":
            assert body.startswith("$ ")
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                command, *shown = part.rstrip("\n").split("\n")
                found.append(Step(command, tuple(shown), about))
        elif kind == "json":
            name = NAMED.search(PAGE[: block.start()])
            assert name
            found.append(Step("", (body,), file=name[1]))
    return found


def pattern(step: Step) -> str:
    """A regular expression of the outputs that the page shows."""
    parts = []
    for line in step.shown:
        if line == ANY_LINES:
            parts.append(r"(?:.*\n)*?")
            continue
        text = re.escape(line)
        parts.append((re.sub(r"\d(?:[\d,]|\\\.)*", r"[\\d,.]+(?:e-\\d+)?", text) if step.about else text) + "\n")
    return "".join(parts)


def exit_code(step: Step) -> int:
    if any(line.startswith("error") for line in step.shown):
        return 2
    return int(step.command.startswith(EXIT_DIFFERS))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A newcomer's home folder after all steps of the page."""
    home = tmp_path_factory.mktemp("home")
    at = home
    (home / "bin").mkdir()
    (home / "bin" / "dsc").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m compiler.cli.main "$@"\n', "utf-8")
    (home / "bin" / "dsc").chmod(0o755)
    environment = os.environ | {
        "HOME": str(home),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "120",
    }
    for step in steps():
        if step.file:
            (at / step.file).parent.mkdir(parents=True, exist_ok=True)
            (at / step.file).write_text(step.shown[0], "utf-8")
            continue
        script = f"exec 2>&1\n{step.command}\ncode=$?\npwd > ~/pwd\nexit $code"
        run = progress.run(["bash", "-c", script], at, environment)
        at = Path((home / "pwd").read_text("utf-8").strip())
        assert run.returncode == exit_code(step), f"$ {step.command}\n{run.stdout}"
        said = LONG_WORK.sub("", run.stdout)
        assert re.fullmatch(pattern(step), said), f"$ {step.command}\n{run.stdout}"
    return home


def test_the_model_learns(home: Path) -> None:
    """What the page says of the numbers: where the loss starts, and that validation passes the unigram bar at once."""
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


def test_what_is_said_to_be_there(home: Path) -> None:
    folder = home / "first"
    assert (folder / "build" / "first" / "stages" / "rank_0.py").read_text("utf-8").count("def ") > 1
    assert "<svg" in (folder / "runs" / "first" / "report.html").read_text("utf-8")
    assert list((folder / "runs" / "first" / "checkpoints" / "step-00000120").glob("*.safetensors"))
    spec = (folder / "qwen.dsc").read_text("utf-8")
    assert "# `attention_dropout` = 0.1: dropout; a spec has none; lost here\n" in spec


def test_the_largest_import_is_as_large_as_is_said() -> None:
    spec = load(ROOT / "tests" / "importers" / "specs" / "deepseek-v3.dsc")
    assert "671B parameters get 1,024 GPUs" in PAGE and spec.cluster.world == 1024


def test_it_is_installed_as_the_makefile_does() -> None:
    """The test runs in the environment that these lines have made."""
    (install,) = (block[3] for block in FENCE.finditer(PAGE) if block[1] == "sh")
    command = ["make", "--dry-run", "--always-make", ".venv/.installed", "PIP=pip install -c constraints.txt"]
    makefile = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    made = re.findall(r"python3 -m venv \S+|pip install [^;&]+", makefile)
    expected = [line.strip().replace("./.venv", ".venv") for line in made]
    assert [line for line in install.splitlines() if not line.startswith(". ")] == expected


def test_every_command_of_the_page_is_run() -> None:
    """Inline `dsc …` names options that exist; whole commands are in the blocks."""
    told = re.findall(r"`(dsc [a-z]+)", FENCE.sub("", PAGE))
    run = {" ".join(step.command.split()[:2]) for step in steps()}
    assert {"dsc init", "dsc check", "dsc explain", "dsc show", "dsc fmt", "dsc train", "dsc report", "dsc diff",
            "dsc import"} <= run  # fmt: skip
    assert set(told) - run <= {"dsc lsp"}
