"""A sweep that trains: each variant in its own folder, none twice, and a page of all."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from compiler.cli.main import main
from tests.runtime.run.place import CORPUS

SPEC = str(Path(__file__).parents[3] / "specs" / "tiny.dsc")


def test_a_sweep_resumes_unfinished_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for name in CORPUS:  # encoding the whole standard library would take longer than training
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py", tmp_path / "corpus")
    words = ["sweep", SPEC, "-s", "train.steps=2", "-s", f'data.source="{tmp_path}/corpus/*.py"']
    words += ["-s", "data.validation=30%"]
    assert main([*words, "-s", "train.seed=1,2"]) == 0
    page = tmp_path / "sweeps/tiny/compared.html"
    output = capfd.readouterr().out
    assert f"compared: {page.relative_to(tmp_path)}" in output
    table = output[output.index("\nrun ", output.index("2 of 2")) :].splitlines()[1:4]
    assert [line.split("  ")[0] for line in table] == ["run", "seed 1", "seed 2"] and "loss" in table[0]
    first = {path: path.stat().st_mtime_ns for path in tmp_path.glob("sweeps/tiny/*/metrics.jsonl")}
    assert {path.parent.name for path in first} == {"seed=1", "seed=2"}
    losses = [path.read_text("utf-8") for path in first]
    assert losses[0] != losses[1]
    assert main([*words, "-s", "train.seed=2,3"]) == 0
    assert "seed=2: has finished" in capfd.readouterr().out
    assert all(path.stat().st_mtime_ns == time for path, time in first.items())
    assert page.read_text("utf-8").count('title="sweeps/tiny/seed=3"') == 2
    assert "train.seed" in page.read_text("utf-8")
