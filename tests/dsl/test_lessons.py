"""Examples of lessons: the wrong one gives the lesson's code, once, and the right one gives no message."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsl.load import analyse, refusals
from dsl.messages.diagnostics import Diagnostic
from dsl.reference.lessons import FILE, Example, lesson, read
from dsl.rules.codes import CODES
from tests import copies

ROOT = Path(__file__).parents[2]
LESSONS = ROOT / "dsl" / "reference" / "lessons"
MOST_LINES = 4  # maximum number of lines that differ between the wrong and the right example


def said(example: Example, with_refusals: bool) -> tuple[Diagnostic, ...]:
    """What `dsc check` says about an example in the current folder."""
    Path(FILE).write_text(example.text, encoding="utf-8")
    program, command, path, *options = shlex.split(example.command)
    assert (program, command) == ("dsc", "check") and set(options[::2]) <= {"-s"}
    analysis = analyse(path, overrides=options[1::2])
    return analysis.diagnostics or (refusals(analysis) if with_refusals else ())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder that holds the shipped specs."""
    folder = tmp_path_factory.mktemp("lessons")
    copies.copytree(ROOT / "specs", folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def test_every_code_has_its_lesson_and_every_lesson_its_code() -> None:
    assert {path.stem for path in LESSONS.glob("*.md")} == set(CODES)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("code", CODES)
def test_examples(code: str) -> None:
    taught, is_refusal = lesson(code), code.startswith("E1")
    wrong = said(taught.wrong, is_refusal)
    assert [item.code for item in wrong] == [code], "\n".join(map(str, wrong))
    right = said(taught.right, is_refusal)
    assert not right, "\n".join(map(str, right))


@pytest.mark.parametrize("code", CODES)
def test_examples_differ_in_little(code: str) -> None:
    taught = lesson(code)
    wrong, right = ([*e.text.splitlines(), e.command] for e in (taught.wrong, taught.right))
    if code != "E0102":  # its subject is length
        changed = [line for line in difflib.ndiff(wrong, right) if line[0] in "+-"]
        assert 0 < len(changed) <= MOST_LINES, changed


@pytest.mark.parametrize("code", CODES)
def test_a_lesson_reads_well(code: str) -> None:
    """A lesson has a few sentences that say why, in lines of 120 columns; parsing loses no part of its file."""
    text = (LESSONS / f"{code}.md").read_text("utf-8")
    taught = lesson(code)
    assert 100 < len(taught.why) < 800 and taught.why.endswith((".", ")"))
    assert all(len(line) <= 120 for line in taught.why.splitlines())
    assert re.findall("^```.", text, re.MULTILINE) == re.findall("^```.", _written_back(text), re.MULTILINE)
    assert not re.search(r"\[\]\(|https?://|TODO", text)


def _written_back(text: str) -> str:
    return "".join(
        match[0] for match in re.finditer(r"^```(dsc|sh)( wrong| right)?( ×\d+)?\n.*?^```\n", text, re.M | re.S)
    )


def test_parts_make_up_an_example() -> None:
    fences = ("dsc\na", "dsc wrong ×2\nb", "dsc right\nc", "sh right\ndsc check mine.dsc -s a=1")
    text = "Why.\n\n" + "".join(f"```{fence}\n```\n" for fence in fences)
    taught = read("E0201", text)
    assert (taught.why, taught.wrong.text, taught.right.text) == ("Why.", "a\nb\nb\n", "a\nc\n")
    assert (taught.wrong.command, taught.right.command) == ("dsc check mine.dsc", "dsc check mine.dsc -s a=1")
