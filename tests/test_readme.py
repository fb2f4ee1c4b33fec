"""What the README shows is what the product gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compiler.cli import COMMANDS
from dsl.load import check

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_code_is_emitted_code() -> None:
    emitted = [p.read_text("utf-8") for p in (ROOT / "tests" / "golden" / "quickstart").rglob("*.py")]
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert snippets
    for snippet in snippets:
        assert any(snippet in text for text in emitted), snippet


def test_the_message_is_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = (ROOT / "specs" / "quickstart.dsc").read_text("utf-8").replace("    pipeline = 2 ", "    pipelin  = 2 ")
    (tmp_path / "bad.dsc").write_text(spec, "utf-8")
    shown = re.search(r"\$ dsc check bad\.dsc.*?\n((?:    .*\n)+)", README)
    assert shown
    (diagnostic,) = check("bad.dsc")
    assert "\n".join(line[4:] for line in shown[1].splitlines()) == str(diagnostic)


def test_the_conflict_is_the_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = re.search(r"\$ dsc check (\S+) -s (\S+)\n    …\n((?:    .*\n)+)", README)
    assert shown
    (diagnostic,) = check(shown[1], overrides=(shown[2],))
    assert str(diagnostic).endswith("\n" + "\n".join(line[4:] for line in shown[3].splitlines()))


def test_every_command_is_named() -> None:
    assert set(re.findall(r"^\| `dsc (\w+)", README, re.MULTILINE)) == set(COMMANDS)


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
