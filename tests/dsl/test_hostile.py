"""Every text, however wrong or hostile, quickly gives a located message or a spec."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsl.load import check
from dsl.messages.diagnostics import Diagnostic, Source, render_all
from dsl.text.parser import MAX_DEPTH, MAX_MISTAKES, decode, parse
from dsl.text.syntax import Attribute

SPECS = Path(__file__).parents[2] / "specs"
BASE = (Path(__file__).parents[1] / "ui" / "lib" / "base.dsc").read_text("utf-8")
SECONDS = 30.0  # CPU seconds: it takes 1.5 on an idle core; a quadratic algorithm would take hours

BOMBS = {
    "statements": "a = 1\n" * 170_000,
    "mistakes": "= =\n" * 250_000,
    "braces": "a {" * 300_000,
    "closers": "}" * 1_000_000,
    "parentheses": "run a { b = " + "(" * 1_000_000,
    "list": "run a { b = [" + "1," * 500_000 + "] }",
    "plus": "run a { b = 1" + "+1" * 500_000 + " }",
    "comments": "#\n" * 500_000,
    "one_comment": "#" * 1_000_000,
    "spaces": " " * 1_000_000,
    "newlines": "\n \n" * 300_000,
    "words": "a " * 500_000,
    "long_word": "a" * 1_000_000,
    "long_number": "run a { b = " + "9" * 1_000_000 + " }",
    "long_string": 'run a { b = "' + "x" * 1_000_000,
    "whole_string": 'run a { b = "' + "x" * 1_000_000 + '" }',
    "escapes": 'run a { b = "' + '\\"' * 500_000 + '" }',
    "dots": "a" + ".a" * 500_000,
    "blank_lines": "\r\n" * 450_000,
    "quotes": '"' * 1_000_000,
    "backslashes": '"' + "\\" * 1_000_000,
    "strange": "\u00e9\u202e\u0660" * 300_000,
    "blocks": "model a { vocab = 1 }\n" * 3_000,
    "lets": "".join(f"let a{i} = a{i + 1} + a{i + 1}\n" for i in range(2000)) + "run a extends base { }",
}


def messages(path: Path, content: bytes) -> tuple[Diagnostic, ...]:
    path.write_bytes(content)
    mistakes = check(path)
    assert render_all(mistakes) or not mistakes
    return mistakes


@pytest.mark.parametrize("more", [0, 1])
def test_operators_are_counted_for_each_statement(more: int) -> None:
    """Two statements and a list may each have the maximum number of operators; one more operator is refused."""
    longest, over = "1" + "+1" * MAX_DEPTH, "1" + "+1" * (MAX_DEPTH + more)
    for text in (
        f"a = {longest}\nb = {over}\nc = {longest}\n",
        f"a {{ b = {over}, c = {longest} }}\n",
        f"a = [{over}]\n",
    ):
        assert [item.code for item in parse(Source("a.dsc", text)).diagnostics] == ["E0103"] * more, text


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_bombs_are_refused_soon(name: str, tmp_path: Path) -> None:
    begin = time.process_time()
    mistakes = messages(tmp_path / "bomb.dsc", BOMBS[name].encode())
    assert 1 <= len(mistakes) <= MAX_MISTAKES + 2
    assert len(render_all(mistakes)) < 100_000
    assert time.process_time() - begin < SECONDS


MISSPELT = {
    "blocks": "".join(
        f"modl m{i} {{ atention mla {{ hed {{ }} }}, lyers 0..3 {{ fnn moe {{ }} }} }}\n" for i in range(250)
    ),
    "names": "run a { model = b }\nmodel b {\n"
    + "".join(f"let a{i} = b.hiden{i}\n b{i} {{ hidden{i} = 1 }}\n" for i in range(2_500))
    + "}",
}


@pytest.mark.parametrize("name", sorted(MISSPELT))
def test_the_intended_name_is_found_quickly(name: str, tmp_path: Path) -> None:
    begin = time.process_time()
    assert len(messages(tmp_path / "bomb.dsc", MISSPELT[name].encode())) > 250
    assert time.process_time() - begin < SECONDS


def test_bombs_take_little_memory() -> None:
    """A right spec after a megabyte of whitespace takes little memory, too. In a process with the fuzzer's limits."""
    program = (
        "from tests.dsl.test_hostile import BASE, BOMBS\n"
        "from tests.fuzz.generate import Input\nfrom tests.fuzz.judge import judged, limit_memory\n"
        "judged(Input('warm', {'spec.dsc': BASE}))\nlimit_memory()\n"
        "right = 'let a = \"%s\"\\n' % ('x' * 4096) + '\\n' * 1_000_000 + BASE\n"
        "assert judged(Input('right', {'spec.dsc': right})) == ()\n"
        "for name, text in BOMBS.items(): assert judged(Input(name, {'spec.dsc': text})), name\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=SPECS.parent, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("last", ["1", "nothing", "a0", "1GB", "99999999999e60"])
def test_doubling_definitions_are_evaluated_once(last: str, tmp_path: Path) -> None:
    lets = "".join(f"let a{i} = a{i + 1} * a{i + 1}\n" for i in range(45)) + f"let a45 = {last}\n"
    text = BASE + lets + "run wrong extends base { parallel { pipeline = a0, expert = a0 + nowhere } }\n"
    begin = time.process_time()
    mistakes = messages(tmp_path / "lets.dsc", text.encode())
    assert {item.code for item in mistakes} <= {"E0301", "E0302", "E0303", "E0305", "E0401", "E0402", "E0804", "E0808"}
    assert time.process_time() - begin < SECONDS


def test_numbers_keep_to_their_bounds(tmp_path: Path) -> None:
    numbers = ["0", "-1", "1e99", "0.5", "9" * 40, "1e-99", "0%", "1_", "99999T", "1e99T"]
    for number in numbers:
        text = BASE + f"run b extends base {{ parallel {{ pipeline = {number} }}, train {{ batch = {number} }} }}\n"
        mistakes = messages(tmp_path / "number.dsc", text.encode())
        assert (not mistakes) == (number == "1_" and not mistakes)


def test_a_pipe_a_folder_and_a_missing_file_are_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.dsc")
    (tmp_path / "folder.dsc").mkdir()
    for name in ("pipe", "folder"):
        assert [item.code for item in check(tmp_path / f"{name}.dsc")] == ["E0101"]
        importing = f'import "{name}.dsc"\nrun a {{ }}\n'.encode()
        (mistake,) = [item for item in messages(tmp_path / "importing.dsc", importing) if item.code == "E0501"]
        assert mistake.hint == "import a regular file"
    assert [item.code for item in check(tmp_path / "missing.dsc")] == ["E0101"]
    assert [item.code for item in check("\0.dsc")] == ["E0101"]


def test_imports_end(tmp_path: Path) -> None:
    for index in range(70):
        (tmp_path / f"f{index}.dsc").write_text(f'import "f{index + 1}.dsc"\n', encoding="utf-8")
    mistakes = check(tmp_path / "f0.dsc")
    assert [item.code for item in mistakes] == ["E0102"]


def test_line_ends_and_marks_do_not_change_the_meaning(tmp_path: Path) -> None:
    plain = parse(Source("a", BASE)).document.body
    for text in (BASE.replace("\n", "\r\n"), BASE.replace("  ", "\t"), BASE + "   # end", BASE.rstrip("\n")):
        parsed = parse(decode("a", b"\xef\xbb\xbf" + text.encode())[0])
        assert not parsed.diagnostics
        assert [type(statement) for statement in parsed.document.body] == [type(statement) for statement in plain]
        keys = [
            [attribute.key.text for attribute in block.body if isinstance(attribute, Attribute)]
            for block in parsed.document.body
        ]
        assert keys == [
            [attribute.key.text for attribute in block.body if isinstance(attribute, Attribute)] for block in plain
        ]


WORDS = [
    *"{}[](),=+-*/\n\"'#%.;_",
    "..",
    " ",
    "\t",
    "run a",
    "model",
    "extends",
    "let",
    "import",
    "layers 0..2",
    "until",
]
WORDS += [
    "auto",
    "none",
    "1f1b",
    "80GB",
    "1e9",
    "128",
    "0",
    "tokens",
    "steps",
    "base",
    "train",
    "moe",
    "e4m3",
    "\x00",
    "\u00e9",
]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200) | st.lists(st.sampled_from(WORDS), max_size=60).map(lambda words: "".join(words).encode())
)
def test_any_bytes_end_in_messages(tmp_path: Path, content: bytes) -> None:
    for item in messages(tmp_path / "any.dsc", content):
        assert item.span is not None or item.code == "E0404"


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_mutated_specs_end_in_messages_or_specs(tmp_path: Path, seed: int, times: int) -> None:
    chooser = random.Random(seed)
    parts = BASE.split(" ")
    for _ in range(times):
        place = chooser.randrange(len(parts))
        change = chooser.choice(["drop", "put", "swap", "double"])
        other_place = chooser.randrange(len(parts))
        if change == "drop":
            parts[place] = ""
        elif change == "put":
            parts[place] = chooser.choice(WORDS)
        elif change == "swap":
            parts[place], parts[other_place] = parts[other_place], parts[place]
        else:
            parts[place] = f"{parts[place]} {parts[place]}"
    for item in messages(tmp_path / "mutated.dsc", " ".join(parts).encode()):
        assert item.span is not None or item.code == "E0404"
