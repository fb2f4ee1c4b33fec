"""All messages are pinned: a bad spec `tests/ui/NAME.dsc` and, beside it in `NAME.txt`, the messages about it.

`pytest tests/dsl/test_ui.py --bless` rewrites the texts; read the diff. A first line `# -s key=value …` sets
overrides. Texts that break a limit on length are generated here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsl.load import analyse, refusals, resolve
from dsl.messages.diagnostics import SpecError, render_all
from dsl.resolve.chosen import find
from dsl.rules.codes import CODES
from dsl.text.parser import MAX_BYTES, MAX_WORDS

UI = Path(__file__).parents[1] / "ui"
NAMES = sorted(path.stem for path in UI.glob("*.dsc"))
MADE = {
    "made_empty": b"",
    "made_large": b"#" * (MAX_BYTES + 1),
    "made_wordy": b"a\n" * MAX_WORDS,
    "made_nul": b"run a {\n  model = \0\n}\n",
    "made_not_utf8": "# \u00e9\nrun caf".encode() + b"\xe9 { }\n",
    "made_deep": b"run a " + b"{ b " * 101,
}


def said(name: str) -> str:
    """The messages about a spec in the current folder: its errors or, if it has none, why it cannot train."""
    first = Path(f"{name}.dsc").read_bytes().split(b"\n")[0].decode(errors="replace")
    overrides = first.removeprefix("# -s ").split(" -s ") if first.startswith("# -s ") else []
    analysis = analyse(f"{name}.dsc", overrides=overrides)
    diagnostics = analysis.diagnostics or refusals(analysis)
    return render_all(diagnostics) + "\n"


def compare(name: str, text: str, bless: bool) -> None:
    expected = UI / f"{name}.txt"
    if bless:
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_message(name: str, bless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(UI)
    compare(name, said(name), bless)


@pytest.mark.parametrize("name", sorted(MADE))
def test_message_of_made_text(name: str, bless: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.dsc").write_bytes(MADE[name])
    compare(name, said(name), bless)


def test_every_code_is_pinned_and_known() -> None:
    pinned = {code for path in UI.glob("*.txt") for code in re.findall(r"\[(E\d{4})\]", path.read_text("utf-8"))}
    assert pinned == set(CODES)


def test_every_text_has_its_spec() -> None:
    assert {path.stem for path in UI.glob("*.txt")} == {*NAMES, *MADE}


def test_several_runs_must_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = (UI / "lib" / "base.dsc").read_text("utf-8")
    Path("two.dsc").write_text(base + "run other extends base { train { seed = 2 } }\n", encoding="utf-8")
    with pytest.raises(SpecError, match=r"several runs\n = hint: name one: `two.dsc:base`, `two.dsc:other`"):
        resolve("two.dsc")
    assert resolve("two.dsc:other").spec.train.seed == 2
    assert resolve("two.dsc", "base").spec.train.seed == 1
    with pytest.raises(SpecError, match=r"has no run `othr`\n = hint: did you mean `other`\?"):
        resolve("two.dsc:othr")


def test_the_one_spec_of_a_folder_is_found(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no spec here"):
        find(tmp_path)
    (tmp_path / "library.dsc").write_text("model a { vocab = 64 }\n", encoding="utf-8")
    (tmp_path / "one.dsc").write_text("run one { }\n", encoding="utf-8")
    assert find(tmp_path) == tmp_path / "one.dsc"
    (tmp_path / "two.dsc").write_text("run two { }\n", encoding="utf-8")
    with pytest.raises(SpecError, match=r"there are several specs here: .*one\.dsc, .*two\.dsc"):
        find(tmp_path)


def test_complaints_about_peers_have_their_specs() -> None:
    """Each row of the table names existing specs, or states what a spec cannot express; each such spec has a row."""
    table = [line for line in (UI / "README.md").read_text("utf-8").splitlines() if line.startswith("| ")][1:]
    named: set[str] = set()
    for complaint, answer in (row.strip("| ").split(" | ") for row in table):
        specs = [name for name in re.findall(r"`(\w+)`", answer) if name in NAMES or name.startswith("peers_")]
        assert specs or answer.startswith("no "), answer
        assert set(specs) <= {*NAMES}, answer
        numbers = re.findall(r"#\d+", complaint)
        for name in specs:
            first = (UI / f"{name}.dsc").read_text("utf-8").split("\n\n")[0]
            assert not name.startswith("peers_") or any(number in first for number in numbers), name
        named |= {*specs}
    assert {name for name in NAMES if name.startswith("peers_")} <= named
