"""`dsc explain`: output, exit codes, and avoided imports."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compiler.cli.main import main
from dsl.reference import keys
from dsl.reference.lessons import lesson
from dsl.reference.topics import names_of_topics
from dsl.rules.codes import CODES, DETAILS
from dsl.rules.codes import FILE_CODES as FILE_CODES
from tests.compiler.cli.forms import parsed

ROOT = Path(__file__).parents[2]


def test_a_code_is_taught(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "e0802"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("E0802: expert divides data·tensor·context\n\n")
    assert "wrong:\n    import" in output and "right:\n    import" in output
    for example in (lesson("E0802").wrong, lesson("E0802").right):
        assert all(line in output for line in example.text.splitlines())
    assert max(map(len, output.splitlines())) <= 100


def test_mistakes_on_the_command_line_show_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "E0504"]) == 0
    output = capsys.readouterr().out
    assert (
        "    $ dsc check mine.dsc -s 'train.batch 8'\n" in output
        and "    $ dsc check mine.dsc -s train.batch=8\n" in output
    )
    main(["explain", "E0101"])
    assert capsys.readouterr().out.count("    $ dsc check ") == 2


def test_many_meanings_are_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "name"]) == 0
    assert capsys.readouterr().out.startswith("schedule.name: ")
    assert main(["explain", "fp32"]) == 0
    output = capsys.readouterr().out
    assert "fp32: a built-in precision; 32-bit floats throughout\n" in output and "fp32: 32-bit float\n" in output


def test_without_arguments_lists_codes_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {code}  {rule}\n" in output for code, rule in CODES.items())
    assert all(re.search(rf"\b{key.name}\b", output) for key in keys().values())


def test_unknown_names_get_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "parallel.exprt"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith(
        "error: there is no code, key or word `parallel.exprt`\n = hint: did you mean `parallel.expert`"
    )
    assert main(["explain", "\x1b[31m" + "q" * 10_000]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error and len(error) < 300


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "model.attention.heads", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["version"] == 1 and {topic["kind"] for topic in document["topics"]} == {"key"}
    assert [topic["name"] for topic in document["topics"]] == [
        f"model.attention.{attention}.heads" for attention in ("mla", "gqa", "compressed", "deltanet")
    ]
    mla = document["topics"][0]
    assert mla["facts"]["takes"] == ["whole number, 1 to 65,536"] and mla["facts"]["default"] == ["must be given"]
    for name in sorted(names_of_topics()):
        main(["explain", name, "--format", "json"])
        assert parsed(capsys.readouterr().out, "explain")["topics"]
    assert main(["explain", "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["codes"] == CODES and list(listed["keys"]) == list(keys())


def test_codes_of_other_files_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(FILE_CODES) == set(DETAILS) and not set(FILE_CODES) & set(CODES)
    for code, rule in FILE_CODES.items():
        assert main(["explain", code.lower()]) == 0
        output = capsys.readouterr().out
        assert output.startswith(f"{code}: {rule}\n") and " ".join(output.split()).endswith(DETAILS[code])
        assert main(["explain", f"{code[:-1]}9"]) == 2


def test_needs_neither_torch_nor_rich() -> None:
    code = (
        "import sys; from compiler.cli.main import main; code = main(['explain', 'parallel.expert']);"
        "sys.exit(code or bool({'torch', 'rich', 'networkx'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True).returncode == 0


def test_on_a_terminal_the_same_text_has_colours() -> None:
    main_end, program_end = pty.openpty()
    command = [sys.executable, "-m", "compiler.cli.main", "explain", "E0802"]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "200"}
    environment.pop("NO_COLOR", None)
    plain = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with subprocess.Popen(command, cwd=ROOT, stdout=program_end, env=environment) as process:
        os.close(program_end)
        output = b""
        while chunk := _read(main_end):
            output += chunk
        assert process.wait() == 0
    os.close(main_end)
    text = output.decode().replace("\r\n", "\n")
    assert "\x1b[" in text
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == plain
    bold, dim, red, green, cyan = (f"\x1b[{code}m" for code in (1, 2, 31, 32, 36))
    assert text.startswith(f"{bold}E0802: ") and f"{bold}see also:\x1b[0m parallel.expert" in text
    assert f"{red}wrong:\x1b[0m\n{red}    import" in text and f"{green}right:\x1b[0m\n{green}    import" in text
    assert f"{cyan}`expert_tensor = 2`\x1b[0m" in text and dim not in text


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is closed
        return b""
