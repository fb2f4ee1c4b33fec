"""`dsc schedule`: output, errors, and that it stays light."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from compiler.commands import schedule as command
from compiler.schedules.dualpipe import dualpipe
from compiler.schedules.schedule import Schedule


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def test_prints_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--name", "dualpipe", "--ranks", "8", "--micro-batches", "20")
    assert run(*sizes) == 0
    assert capsys.readouterr().out == dualpipe(8, 20).to_text()
    assert run(*sizes, "--format", "json") == 0
    assert Schedule.from_json(capsys.readouterr().out) == dualpipe(8, 20)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "message"),
    [
        ("dualpipe", "7", "20", "use 6 or 8"),
        ("dualpipe", "8", "14", "use 16, or 1f1b"),
        ("dualpipe", "8", "21", "use 20 or 22"),
        ("dualpipe", "0", "20", "--ranks 0 is out of bounds: use 1 to 512"),
        ("1f1b", "1", "-1", "--micro-batches -1 is out of bounds: use 1 to 65536"),
        ("1f1b", "1000000000", "1", "--ranks 1000000000 is out of bounds"),
        ("1f1b", "512", "1025", "use --micro-batches 1024 or fewer"),
        ("dualpip", "8", "20", "unknown schedule 'dualpip': use one of 1f1b, dualpipe"),
    ],
)
def test_bad_sizes_say_what_to_change(
    name: str, ranks: str, micro_batches: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--name", name, "--ranks", ranks, "--micro-batches", micro_batches) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_imports_neither_torch_nor_networkx() -> None:
    code = (
        "import argparse, sys; from compiler.commands import schedule as c; p = argparse.ArgumentParser();"
        "c.add_arguments(p); c.run(p.parse_args('--name dualpipe --ranks 2 --micro-batches 4'.split()));"
        "assert not {'torch', 'networkx', 'pydantic', 'numpy'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
