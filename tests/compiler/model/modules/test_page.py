"""The example of docs/custom-layers.md is compiled, trained on two ranks and evaluated, with the errors on the page."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from compiler.model.ops.torch_calls import is_torch_call
from tests import forks

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "custom-layers.md"


def dsc(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in a folder."""
    return forks.run("compiler.cli.main", words, folder)


def test_the_example_trains(tmp_path: Path) -> None:
    blocks = re.findall(r"^`([\w.]+)`[^\n]*:\n\n```\w*\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    assert [name for name, _ in blocks] == ["layers.py", "train.dsc"]
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    checked = dsc(tmp_path, "check", "train.dsc")
    assert checked.returncode == 0, checked.stderr
    trained = dsc(tmp_path, "train", "train.dsc")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 4 and losses[-1] < losses[0]

    build = tmp_path / "build" / "mine"
    (segment,) = (path for path in (build / "segments").glob("dense_*.py") if "layers.py:Gated" in path.read_text())
    assert "aten.mish.default(" in segment.read_text()
    listed = json.loads((build / "kernels.json").read_text())
    ops = {op["op"] for entry in listed["segments"] for op in entry["ops"]}
    assert any(map(is_torch_call, ops))

    (tmp_path / "layers.py").rename(tmp_path / "text.md")  # a run has the graphs, and its source is text as any other
    evaluated = dsc(tmp_path, "eval", "runs/mine", "--text", "text.md", "--format", "json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert 0 < json.loads(evaluated.stdout)["loss"] < 2 * losses[0]
    written = dsc(tmp_path, "generate", "runs/mine", "def ")
    assert written.returncode == 2 and "were traced for whole sequences" in written.stderr
    exported = dsc(tmp_path, "export", "hf", "runs/mine", "-o", "hf")
    assert exported.returncode == 2 and "no published family has the module layers.py:Along" in exported.stderr
