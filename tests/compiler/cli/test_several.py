"""A folder with several specs: every command names them relative to its working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.cli.main import main

TINY = (Path(__file__).parents[3] / "specs" / "tiny.dsc").read_text("utf-8")


@pytest.mark.parametrize("command", ["check", "show", "train", "compile"])
def test_names_are_relative(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one.dsc", "two.dsc"):
        (tmp_path / name).write_text(TINY, encoding="utf-8")
    assert main([command]) == 2
    err = capsys.readouterr().err
    assert err == (
        "error[E0404]: there are several specs here: one.dsc, two.dsc\n = hint: name one: `one.dsc`\n"
        + "\n1 error\n" * (command == "check")
    )
