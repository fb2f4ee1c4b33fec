"""The command line as a whole: help, hints, and how little is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compiler.cli.main import COMMANDS, command_parser, main

ROOT = Path(__file__).parents[3]
Captured = pytest.CaptureFixture[str]


def said(capsys: Captured, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line that exits in argparse."""
    with pytest.raises(SystemExit) as end:
        main(list(words))
    stdout, stderr = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, stdout, stderr


def test_without_arguments_prints_usage(capsys: Captured) -> None:
    code, stdout, stderr = said(capsys)
    assert code == 2 and stdout == "" and all(f"  {name} " in stderr for name in COMMANDS)
    code, stdout, stderr = said(capsys, "--help")
    assert code == 0 and stderr == "" and all(line in stdout for line in COMMANDS.values())


def test_version(capsys: Captured) -> None:
    from importlib.metadata import version

    assert said(capsys, "--version") == (0, f"dsc {version('dsc-trainer')}\n", "")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("chekc",), "there is no command 'chekc'", "did you mean `check`?"),
        (("xyz",), "there is no command 'xyz'", "`dsc --help` explains the usage"),
        (("mine.dsc",), "there is no command 'mine.dsc'", "write `dsc check mine.dsc` or `dsc train mine.dsc`"),
        (("-s", "a=1", "check"), "there is no command 'a=1'", "`dsc --help` explains the usage"),
        (("--verbose", "check"), "options come after the command: dsc check …", "`dsc --help` explains the usage"),
        (("train", "--resum"), "unrecognized arguments: --resum", "did you mean `--resume`?"),
        (("train", "--gpu"), "unrecognized arguments: --gpu", "`dsc train --help` explains the usage"),
        (("check", "--formt", "json"), "unrecognized arguments: --formt", "did you mean `--format`?"),
        (("check", "--format", "jsn"), "argument --format: invalid choice: 'jsn'", "did you mean `json`?"),
        (("init", "--from", "quickstat"), "argument --from: invalid choice: 'quickstat'", "did you mean `quickstart`?"),
        (("diff",), "the following arguments are required: A", "`dsc diff --help` explains the usage"),
        (("check", "--\x1b[31m"), "unrecognized arguments: --\N{SYMBOL FOR ESCAPE}[31m", "`dsc check --help`"),
    ],
)
def test_suggests_the_intended_word(words: tuple[str, ...], message: str, hint: str, capsys: Captured) -> None:
    code, stdout, stderr = said(capsys, *words)
    assert code == 2 and stdout == ""
    assert stderr.startswith(f"error: {message}") and f"\n = hint: {hint}" in stderr and stderr.count("\n") == 2


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_has_examples_and_exit_codes(name: str, capsys: Captured) -> None:
    code, stdout, _ = said(capsys, name, "--help")
    assert code == 0 and f"\n  dsc {name}" in stdout.partition("examples:")[2]
    assert "exit codes: 0 " in stdout.lower()
    for action in command_parser(name)._actions:
        assert action.help, action.dest


def test_options_may_stand_anywhere(capsys: Captured) -> None:
    spec = str(ROOT / "specs" / "tiny.dsc")
    for words in (
        ("show", spec, "train.seed", "-s", "train.seed=5"),
        ("show", "-s", "train.seed=5", spec, "train.seed"),
        ("show", spec, "-s", "train.seed=5", "train.seed"),
    ):
        assert main(list(words)) == 0
        assert capsys.readouterr().out == "5\n"


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (("check", "specs/tiny.dsc"), ("torch", "rich", "networkx", "jinja2", "numpy", "compiler.cli.commands.show")),
        (
            ("show", "specs/tiny.dsc", "--origin"),
            ("torch", "rich", "networkx", "jinja2", "numpy", "compiler.model.layers"),
        ),
        (("diff", "specs/tiny.dsc", "-s", "train.seed=1"), ("torch", "rich", "networkx")),
        (("completion", "zsh"), ("torch",)),
        (("--version",), ("pydantic", "dsl", "torch", "compiler.cli.commands")),
    ],
)
def test_commands_import_few_packages(words: tuple[str, ...], absent: tuple[str, ...]) -> None:
    code = f"import sys; from compiler.cli.main import main\ntry: main({list(words)!r})\nexcept SystemExit: pass\n"
    code += f"sys.exit(' '.join(name for name in {absent!r} if name in sys.modules))"
    done = subprocess.run((sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_an_interrupted_command_exits_with_the_signal_code_of_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("compiler.cli.commands.doctor.run", interrupted)
    assert main(["doctor"]) == 130
