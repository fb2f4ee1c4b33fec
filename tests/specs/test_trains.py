"""Every laptop spec is compiled and trained for some steps by `dsc train`, as a newcomer would do it."""

from __future__ import annotations

import json
import math
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests import progress
from tests.specs.shipped import SPECS, shipped

LAPTOP = ("tiny", "quickstart", "laptop-gqa", "laptop-v2")
CORPUS = ("bisect", "contextlib", "copy", "fnmatch", "heapq", "shlex", "string", "textwrap", "argparse", "ast", "cmd")
STEPS = 3


@pytest.mark.parametrize("name", LAPTOP)
def test_trains(name: str, tmp_path: Path) -> None:
    """All is as shipped but the text: some files of the standard library, and a tokenizer of them."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for module in CORPUS:
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py", corpus)
    words = ["train", str(SPECS / f"{name}.dsc"), "--steps", str(STEPS), "--data", str(tmp_path), "--out", "run"]
    words += ["-s", f"data.source={corpus}/*.py", "-s", "data.tokenizer=train(300)"]
    done = progress.run((sys.executable, "-P", "-m", "compiler.cli", *words), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    spec = shipped(f"{name}.dsc")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["loss"] == pytest.approx(math.log(spec.model.vocab), abs=0.3), "nothing is known yet"
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert len({row["loss"] for row in rows}) == STEPS
    assert (tmp_path / "run" / "report.html").is_file()
