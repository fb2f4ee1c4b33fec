"""`dsc schedule --format …`: pictures of schedules of any size, of several, and of a spec's run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compiler.cli.commands import schedule as command
from tests.compiler.tools.picture.test_files import SVG

ROOT = Path(__file__).parents[4]
SIZES = ("--name", "dualpipe", "--ranks", "4", "--micro-batches", "10")


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("svg", b"<svg "),
        ("html", b"<!DOCTYPE html>"),
        ("trace", b'{"displayTimeUnit"'),
        ("terminal", b"dualpipe, 4 ranks"),
    ],
)
def test_a_file_of_every_format(name: str, begins: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "picture"
    assert run(*SIZES, "--costs", "FB=2.5", "--format", name, "-o", str(path)) == 0
    assert path.read_bytes().startswith(begins) and capsys.readouterr().out == ""
    if name == "svg":
        words = [e.text or "" for e in ElementTree.parse(path).iter(f"{SVG}text")]
        assert any(line.startswith("makespan 29 · bubble 5.2% · bound ") for line in words)


def test_shipped_costs_are_drawn_in_their_unit(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    for words in ((*SIZES,), ("--compare", "1f1b,zbv", *SIZES[2:])):
        assert run(*words, "--costs", "deepseek-v3-low", "--format", "svg", "-o", str(path)) == 0
        text = path.read_text("utf-8")
        assert ">time in ms<" in text and "units of the costs" not in text
        path.unlink()


def test_compared_schedules_share_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--compare", "dualpipe,1f1b,zbv", "--ranks", "4", "--micro-batches", "10", "--costs", "FB=2.5")
    assert run(*words, "--format", "terminal") == 0
    stdout = capsys.readouterr().out
    table = {line.split()[0]: line.split()[1] for line in stdout.splitlines() if len(line.split()) == 8}
    assert table["dualpipe"] == "29" and table["1f1b"] == "39" and "1/P of the model" in stdout
    assert run(*words, "--format", "trace", "-o", str(tmp_path / "t.json")) == 0
    events = json.loads((tmp_path / "t.json").read_text("utf-8"))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"{name}, rank {rank}" for name in ("dualpipe", "1f1b", "zbv") for rank in range(4)]
    zbv = [e for e in events if e["ph"] == "X" and e["pid"] == 8 and e["name"] == "F0.0"]
    assert [e["dur"] for e in zbv] == [500]  # two stages a rank: each is half of 1/P of the model
    activations = [e["args"]["held"] for e in events if e["ph"] == "C" and e["pid"] == 8]
    assert max(activations) == 4  # and so is an activation


def test_an_unsupported_size_in_a_comparison_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--compare", "1f1b,dualpipe", "--ranks", "3", "--micro-batches", "6", "--format", "terminal") == 0
    stdout = " ".join(capsys.readouterr().out.split())
    assert "dualpipe: dualpipe needs an even number of ranks" in stdout and "rank 2" in stdout


def test_a_picture_of_a_spec_shows_what_its_ranks_communicate(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert run(str(ROOT / "specs" / "quickstart.dsc"), "--format", "trace", "-o", str(path)) == 0
    value = json.loads(path.read_text("utf-8"))
    events = [e for e in value["traceEvents"] if e["ph"] == "X"]
    exchanges = [e for e in events if e["cat"] == "communication"]
    actions = {(e["pid"], e["name"]): e for e in events if e["tid"] == 0}
    assert value["otherData"]["unit"] == "ms" and {e["name"].split()[0] for e in exchanges} >= {"dispatch", "combine"}
    for e in exchanges:  # inside of the action that starts it
        name = e["name"].split()[1].split("@")[0]
        action = actions.get((e["pid"], name)) or actions[e["pid"], name.replace("I", "B")]
        assert action["ts"] - 0.01 <= e["ts"] <= e["ts"] + e["dur"] <= action["ts"] + action["dur"] + 0.01
    again = tmp_path / "again.json"
    assert run(str(ROOT / "specs" / "quickstart.dsc"), "--format", "trace", "-o", str(again)) == 0
    assert again.read_bytes() == path.read_bytes()


def test_schedules_too_large_for_a_format_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--name", "1f1b", "--ranks", "512", "--micro-batches", "512", "--format", "svg", "-o", str(tmp_path / "x"))
    assert run(*words) == 2
    assert "524,288 actions are too many for svg" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_text_needs_no_library_that_draws() -> None:
    code = (
        "import sys; from compiler.cli.main import main;"
        "code = main('schedule --name 1f1b --ranks 2 --micro-batches 4'.split());"
        "sys.exit(code or bool({'jinja2', 'rich', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True).returncode == 0
