"""The command `dsc check`, and its start-up cost."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from compiler.cli.commands import check
from dsl import load

ROOT = Path(__file__).parents[2]
BASE = ROOT / "tests" / "ui" / "lib" / "base.dsc"


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    return check.run(parser.parse_args(words))


def test_a_right_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(BASE)) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{BASE}: right") and not err


def test_a_wrong_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(BASE), "-s", "parallel.pipelin=2", "--set", "train.batch=15") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("\n2 errors\n")
    assert "error[E0201]" in err and "error[E0807]" in err


def test_specs_that_cannot_train_yet_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("-s", "precision.combine=e4m3", "-s", "parallel.route=flat")
    assert run(str(ROOT / "specs" / "deepseek-v3.dsc") + ":pretrain", *overrides) == 0
    out, err = capsys.readouterr()
    assert "run pretrain is right, but cannot be compiled and trained yet" in out
    assert "warning[E1001]" in out and err == ""


def test_no_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run() == 2
    assert "there is no spec here" in capsys.readouterr().err
    Path("one.dsc").write_bytes(BASE.read_bytes())
    assert run() == 0
    assert capsys.readouterr().out.startswith("one.dsc: right")


def test_check_imports_nothing_heavy() -> None:
    code = """
import sys
from compiler.cli.commands import check
from dsl.load import load
load("specs/deepseek-v3.dsc")
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "networkx", "numpy", "rich", "jinja2"}))
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"


def test_blocks_that_no_run_takes_are_checked(tmp_path: Path) -> None:
    (tmp_path / "base.dsc").write_bytes(BASE.read_bytes())
    path = tmp_path / "spec.dsc"
    path.write_text(
        """import "base.dsc"
run a extends base { }
model spare extends base { hiden = 4 }
model part { hidden = 128 }                      # not whole, and not meant to be: it is extended
model whole extends part { hiden = 4 }
cluster other { nodes = 0 }
"""
    )
    mistakes = load.check(path)
    first = mistakes[0]
    assert (first.code, first.span and first.span.line) == ("E0201", 3)
    assert {item.span.line for item in mistakes if item.span} == {3, 5, 6}
    assert load.check(path, run="a") == ()
