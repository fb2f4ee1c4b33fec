"""The README and its linked pages show the real output of dsc."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.emit.build_summary import fullest
from compiler.pipeline import lower_spec
from dsl.load import check, load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def page(name: str) -> str:
    """The text of a page of docs."""
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


def test_the_shown_run_equals_the_quickstart(tmp_path: Path) -> None:
    """The keys of the shortened run equal the shipped one, and it is valid."""
    example = re.search(r"^    run quickstart \{\n(?:     .*\n)+    \}\n", README, re.MULTILINE)
    assert example
    shipped = ROOT / "specs" / "quickstart.dsc"
    _, _, following = shipped.read_text("utf-8").partition("\n}\n")  # the run comes first
    (tmp_path / "short.dsc").write_text(textwrap.dedent(example[0]) + following, "utf-8")
    full, short = load(shipped), load(tmp_path / "short.dsc")
    for key in ("model", "cluster", "precision", "parallel", "schedule", "data"):
        assert getattr(short, key) == getattr(full, key), key
    for key in ("sequence", "micro_batch", "batch", "tokens", "optimizer", "rate"):
        assert getattr(short.train, key) == getattr(full.train, key), key


def test_shown_code_is_emitted_code() -> None:
    emitted = [p.read_text("utf-8") for p in (ROOT / "tests" / "golden" / "quickstart").rglob("*.py")]
    snippets = re.findall(r"```python\n(.*?)```", page("builds"), re.DOTALL)
    assert snippets
    for snippet in snippets:
        assert any(snippet in text for text in emitted), snippet


def test_the_shown_message_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = (ROOT / "specs" / "quickstart.dsc").read_text("utf-8").replace("    pipeline = 2 ", "    pipelin  = 2 ")
    (tmp_path / "bad.dsc").write_text(spec, "utf-8")
    example = re.search(r"\$ dsc check bad\.dsc.*?\n((?:    .*\n)+)", README)
    assert example
    (diagnostic,) = check("bad.dsc")
    assert "\n".join(line[4:] for line in example[1].splitlines()) == str(diagnostic)


def test_the_shown_conflict_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    example = re.search(r"\$ dsc check (\S+) -s (\S+)\n    …\n((?:    .*\n)+)", page("language"))
    assert example
    (diagnostic,) = check(example[1], overrides=(example[2],))
    assert str(diagnostic).endswith("\n" + "\n".join(line[4:] for line in example[3].splitlines()))


@pytest.mark.parametrize(("path", "least"), [("README.md", 1), ("docs/planning.md", 3)])
def test_commands_print_the_shown_output(
    path: str, least: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every `$ dsc plan` and `$ dsc schedule` prints the shown lines in this order; … stands for any lines."""
    monkeypatch.chdir(ROOT)
    examples = re.findall(
        r"^( *)\$ (dsc (?:plan|schedule) .*)\n((?:\1\S.*\n|\1 .*\n)+)", (ROOT / path).read_text("utf-8"), re.M
    )
    assert len(examples) >= least
    for indent, command, block in examples:
        assert main(command.split()[1:]) == 0
        printed = iter(capsys.readouterr().out.splitlines())
        for line in (row.removeprefix(indent) for row in block.splitlines()):
            assert line.strip() in ("…", "```") or any(line == printed_line.rstrip() for printed_line in printed), (
                command,
                line,
            )


def test_memory_of_deepseek_v3_in_bf16() -> None:
    spec = load(ROOT / "specs" / "deepseek-v3.dsc", "pretrain", ["precision=bf16"])
    _, memory = fullest(spec, lower_spec(spec))
    used_gib, room_gib = round(memory.total / 2**30), round(spec.cluster.node.device.room / 2**30, 1)
    assert f"the fullest device holds {used_gib} GiB, and an H800 has room for {room_gib}." in " ".join(
        page("guarantees").split()
    )
