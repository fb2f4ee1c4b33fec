"""`dsc fmt`: what it changes in a text, what it preserves, and the command."""

from __future__ import annotations

import io
import os
import random
import re
import stat
import sys
from pathlib import Path

import pytest

from compiler.cli.main import main
from dsl.canonical import canonical
from dsl.load import load
from dsl.messages.diagnostics import Source, SpecError
from dsl.text.formatter import format_source
from dsl.text.parser import MAX_BYTES, decode, parse
from dsl.text.syntax import Statement
from dsl.text.table import tokens

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "specs").rglob("*.dsc"))
FIXTURES = [*SHIPPED, *sorted((ROOT / "tests" / "ui").rglob("*.dsc"))]

# a text, and how it is formatted
EXAMPLES = {
    "braces and commas": ("run a{b=1,c = 2 ,d{e=[ 1,2 ,]}}", "run a { b = 1, c = 2, d { e = [1, 2,] } }\n"),
    "indentation": ("a {\nb {\n\tc = 1\n      }\n}", "a {\n  b {\n    c = 1\n  }\n}\n"),
    "one indent for two braces": ("a { b {\nc = 1\n} }", "a { b {\n  c = 1\n} }\n"),
    "brackets over lines": ("a = [\n1,\n(2 +\n3)\n]", "a = [\n  1,\n  (2 +\n    3)\n]\n"),
    "empty lines": ("\n\n\na = 1\n\n\n\nb {\n\n\nc = 1\n\n}\n\n\n", "a = 1\n\nb {\n  c = 1\n}\n"),
    "signs and operators": (
        "a=-1\nb=2-1\nc=(- 3)*4/ 5\nd=[-1,- 2]\ne=f(-1)",
        "a = -1\nb = 2 - 1\nc = (-3) * 4 / 5\nd = [-1, -2]\ne = f(-1)\n",
    ),
    "ranges": ("layers 0 .. 2{ }\nlayers 1+1..n *2 { }", "layers 0..2         { }\nlayers 1 + 1..n * 2 { }\n"),
    "equals in a column": (
        "sequence = 1\nmicro_batch = 2\nbatch { from = 1 }\n\nseed = 1",
        "sequence    = 1\nmicro_batch = 2\nbatch       { from = 1 }\n\nseed = 1\n",
    ),
    "an open block ends a column": ("a = 1\nlong {\nb = 2\n}\ncc = 3", "a = 1\nlong {\n  b = 2\n}\ncc = 3\n"),
    "labels in a column": (
        "layers 0..2 { f = 1 }\nlayers 3..60 {\ng = 1\n}",
        "layers 0..2  { f = 1 }\nlayers 3..60 {\n  g = 1\n}\n",
    ),
    "lets in a column": ("let a = 1\nlet bcd = 2\nx = 3", "let a   = 1\nlet bcd = 2\nx = 3\n"),
    "a kind is in no column": (
        "tokens = 1\noptimizer adamw { }\nb = 2",
        "tokens = 1\noptimizer adamw { }\nb = 2\n",
    ),
    "comments in a column": (
        "a = 1# one\nbc = 22      # two\nd = 3\n# alone\ne {   # open\nf = 1 #  kept  \n}",
        "a  = 1   # one\nbc = 22  # two\nd  = 3\n# alone\ne {  # open\n  f = 1  #  kept\n}\n",
    ),
    "comments in blocks and lists": ("a {\n# b\n\n}\nc = [ # d\n1 # e\n]", "a {\n  # b\n}\nc = [  # d\n  1  # e\n]\n"),
    "strings are not touched": ('a   =  "b  { #  \\" "', 'a = "b  { #  \\" "\n'),
    "phases": ("a { warmup   2000  steps to  1e-3 , constant }", "a { warmup 2000 steps to 1e-3, constant }\n"),
    "line ends": ("a = 1\r\n\r\n\r\n# b\r\nc = 2", "a = 1\n\n# b\nc = 2\n"),
    "commas alone": ("a = 1 , , b = 2 ,\nc", "a = 1,, b = 2,\nc\n"),
    "nothing": (" \n\t\n", ""),
    "only a comment": ("#", "#\n"),
}


def format_text(text: str) -> str:
    return format_source(Source("spec.dsc", text))


def meaning(value: object) -> object:
    """A document without its source locations: what `fmt` must keep."""
    if isinstance(value, tuple):
        return tuple(meaning(part) for part in value)
    places = ("span", "head", "end", "source")
    names = [name for name in getattr(value, "__dataclass_fields__", {}) if name not in places]
    if not names:
        return value
    return (type(value).__name__, *(meaning(getattr(value, name)) for name in names))


def read(text: str) -> tuple[Statement, ...]:
    return parse(Source("spec.dsc", text)).document.body


def comments(text: str) -> list[str]:
    """All comments of a text."""
    gaps, place = [], 0
    for token in tokens(text):
        gaps.append(text[place : token.start].strip(" \t"))
        place = token.end
    return [gap for gap in (*gaps, text[place:].strip(" \t")) if gap]


def shaken(text: str, chooser: random.Random) -> str:
    """The text with other whitespace wherever whitespace has no meaning."""
    parts, place = [], 0
    for token in tokens(text):
        gap = text[place : token.start]
        if gap and not gap.strip(" \t"):
            gap = chooser.choice([" ", "  ", "\t", " \t  "])
        elif gap:
            gap = chooser.choice(["", " ", "\t\t"]) + gap.strip(" \t") + chooser.choice(["", " ", "\t"])
        parts += [gap, token.text if token.type != "NEWLINE" else re.sub(r"[ \t]", "", token.text)]
        place = token.end
    return "".join((*parts, text[place:]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    before, after = EXAMPLES[name]
    assert format_text(before) == after
    assert format_text(after) == after


def keeps(text: str) -> bool:
    """Whether a text can be parsed. If so, asserts that formatting keeps everything that must stay."""
    if parse(Source("spec.dsc", text)).diagnostics:
        with pytest.raises(SpecError):
            format_text(text)
        return False
    formatted_text = format_text(text)
    assert format_text(formatted_text) == formatted_text
    assert meaning(read(formatted_text)) == meaning(read(text))
    assert comments(formatted_text) == comments(text)
    lines = [[token.text for token in line] for line in _lines(text)]
    assert [[token.text for token in line] for line in _lines(formatted_text)] == lines
    assert not re.search(r"[ \t\r]\n|\n\n\n|\A\n|\n\n\Z|[^\n]\Z", formatted_text)
    return True


def _lines(text: str) -> list[list[object]]:
    lines: list[list[object]] = [[]]
    for token in tokens(text):
        if token.type == "NEWLINE":
            lines.append([])
        else:
            lines[-1].append(token)
    return [line for line in lines if line]


def test_every_spec_and_fixture_keeps_its_words_and_comments() -> None:
    verdicts = [keeps(decode(path.name, path.read_bytes())[0].text) for path in FIXTURES]
    assert sum(verdicts) > len(SHIPPED) + 50 and not all(verdicts)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_blanks_do_not_matter(path: Path, seed: int) -> None:
    text = path.read_text("utf-8")
    assert format_text(shaken(text, random.Random(seed))) == format_text(text)


def test_soups_keep_their_words_and_comments() -> None:
    """Lines of all specs in random order; texts that cannot be parsed are skipped."""
    chooser = random.Random(2)
    pool = [line for path in SHIPPED for line in path.read_text("utf-8").splitlines()]
    words = [token.text for path in SHIPPED for token in tokens(path.read_text("utf-8")) if token.type != "NEWLINE"]
    num_read = 0
    for _ in range(1500):
        lines = chooser.choices(pool, k=chooser.randint(1, 6))
        lines += [" ".join(chooser.choices(words, k=chooser.randint(1, 4))) for _ in range(chooser.randint(0, 2))]
        chooser.shuffle(lines)
        text = chooser.choice(["\n", "\n", "\n\n", ",", "\r\n"]).join(lines)
        opened = text.count("{") - text.count("}")
        num_read += keeps(text + chooser.choice(["}", "\n}"]) * opened)
    assert num_read > 200


def test_canonical_specs_are_laid_out_but_for_columns() -> None:
    text = canonical(load(ROOT / "specs" / "quickstart.dsc"))
    assert meaning(read(format_text(text))) == meaning(read(text))
    assert re.sub(r" +", " ", format_text(text)) == re.sub(r" +", " ", text)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_specs_are_formatted(path: Path) -> None:
    text = path.read_text("utf-8")
    assert format_text(text) == text, f"run `dsc fmt {path.relative_to(ROOT)}`"


# ---------------------------------------------------------------- the command


UGLY, PRETTY = "run a{b=1}", "run a { b = 1 }\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("one.dsc", "deep/two.dsc", ".hidden/three.dsc", "deep/four.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(UGLY.encode())
    Path("good.dsc").write_bytes(PRETTY.encode())
    return tmp_path


def test_a_folder_is_formatted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("one.dsc").chmod(0o640)
    before = Path("good.dsc").stat()
    assert main(["fmt"]) == 0
    assert capsys.readouterr().out == "formatted one.dsc\nformatted deep/two.dsc\n"
    assert Path("one.dsc").read_text() == Path("deep/two.dsc").read_text() == PRETTY
    assert stat.S_IMODE(Path("one.dsc").stat().st_mode) == 0o640
    assert Path(".hidden/three.dsc").read_text() == Path("deep/four.txt").read_text() == UGLY
    assert (before.st_ino, before.st_mtime_ns) == (Path("good.dsc").stat().st_ino, Path("good.dsc").stat().st_mtime_ns)
    assert sorted(path.name for path in folder.iterdir()) == [".hidden", "deep", "good.dsc", "one.dsc"]
    assert main(["fmt"]) == 0 and capsys.readouterr().out == ""


def test_check_names_unformatted_files_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fmt", "--check", "one.dsc", "good.dsc", "one.dsc"]) == 1
    assert capsys.readouterr().out == "one.dsc\n"
    assert main(["fmt", "--check", "good.dsc"]) == 0
    assert main(["fmt", "--diff", "deep"]) == 1
    lines = ["--- deep/two.dsc", "+++ deep/two.dsc formatted", "@@ -1 +1 @@", f"-{UGLY}", f"+{PRETTY}"]
    assert capsys.readouterr().out == "\n".join(lines)
    assert Path("one.dsc").read_text() == UGLY


@pytest.mark.parametrize("content", [b"run a { b = }", b"run \xff", b"run a {\0}", b"#" * 2**21])
def test_nothing_is_written_if_one_file_is_invalid(
    content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong.dsc").write_bytes(content)
    assert main(["fmt"]) == 2
    assert "wrong.dsc" in capsys.readouterr().err
    assert Path("one.dsc").read_text() == UGLY
    assert Path("wrong.dsc").read_bytes() == content


def test_only_regular_files_are_formatted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe.dsc")
    Path("link.dsc").symlink_to("one.dsc")
    Path("loop").symlink_to(".")
    for name in ("pipe.dsc", "link.dsc", "missing.dsc", "/dev/zero", "deep/two.dsc/x"):
        assert main(["fmt", name]) == 2
        assert name in capsys.readouterr().err
    assert main(["fmt", "."]) == 0
    assert capsys.readouterr().out == "formatted one.dsc\nformatted deep/two.dsc\n"
    assert Path("link.dsc").is_symlink()


def test_an_unwritable_folder_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["fmt", "one.dsc"]) == 2
    assert "one.dsc cannot be written: No space left on device" in capsys.readouterr().err
    assert Path("one.dsc").read_text() == UGLY and len(list(folder.iterdir())) == 4


def test_stdin_goes_to_stdout(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    for content, code in ((b"\xef\xbb\xbfrun a{b=1 # \xc3\xa9\r\n}", 0), (b"run a {", 2), (b"\xff", 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert main(["fmt", "-"]) == code
        out, err = capfdbinary.readouterr()
        assert out == (b"run a { b = 1  # \xc3\xa9\n}\n" if not code else b"")
        assert (b"stdin:1:" in err) == bool(code)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"#" * (MAX_BYTES + 1))))
    assert main(["fmt", "-"]) == 2
    assert b"stdin has more than the 1,048,576 bytes that are allowed" in capfdbinary.readouterr().err
    assert main(["fmt", "-", "--check"]) == 2


def test_a_diff_sends_no_escape_to_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("one.dsc").write_text("run  a { } # \x1b]0;title\x07\u202e\n", encoding="utf-8")
    assert main(["fmt", "--diff", "one.dsc"]) == 1
    diff = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e"} & set(diff) and "]0;title" in diff
