"""Completion scripts: the one for bash is run; those for zsh and fish are pinned for a small command line."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from compiler.cli.completion import SHELLS
from compiler.cli.completion.command_words import CommandLine, command_line
from compiler.cli.main import COMMANDS, command_parser, main
from dsl.load import resolve
from dsl.rules.codes import CODES
from dsl.schema import OPTIMIZERS, AdamW, Compressed, DeltaNet, Gqa, Mla

GOLDEN = Path(__file__).parent / "golden"
QUICK = Path(__file__).parents[3] / "specs" / "quickstart.dsc"
# Keys that the spec's attention lacks, or has as a block.
OTHER_KINDS = {*Gqa.model_fields, *Compressed.model_fields, *DeltaNet.model_fields} - {*Mla.model_fields}
OF_OTHERS = {f"model.attention.{name}" for name in OTHER_KINDS | {"head_dim"}}
HARNESS = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_dsc
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def line() -> CommandLine:
    return command_line({name: command_parser(name) for name in COMMANDS})


@pytest.fixture
def complete(line: CommandLine, tmp_path: Path):  # type: ignore[no-untyped-def]
    """The proposals of bash for words, the last of them incomplete. There are two specs and a folder."""
    bash = shutil.which("bash")
    assert bash, "bash is needed"
    script = tmp_path / "script"
    script.write_text(SHELLS["bash"](line), "utf-8")
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for name in ("one.dsc", "two words.dsc", "notes.txt"):
        (folder / name).write_text("", "utf-8")

    def run(*words: str) -> list[str]:
        command = (bash, "--norc", "-c", HARNESS, "bash", str(script), "dsc", *words)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return [text for text in done.stdout.split("\n") if text]

    return run


def test_commands_and_options(complete) -> None:  # type: ignore[no-untyped-def]
    assert set(complete("")) == {*COMMANDS, "--help", "--version"}
    assert complete("comp") == ["compare", "completion", "compile"]
    for name in COMMANDS:
        visible = [action for action in command_parser(name)._actions if action.help != argparse.SUPPRESS]
        flags = {flag for action in visible for flag in action.option_strings}
        assert set(complete(name, "-")) == flags


def test_values(complete) -> None:  # type: ignore[no-untyped-def]
    assert complete("check", "--format", "") == ["text", "json", "github"]
    assert complete("check", "--format", "=", "j") == ["json"]  # as bash cuts --format=j
    assert complete("check", "--format", "=") == ["text", "json", "github"]
    assert complete("completion", "") == ["bash", "zsh", "fish"]
    assert "starter" in complete("init", "--from", "")
    assert complete("train", "--device", "cu") == ["cuda"]
    assert complete("train", "--steps", "") == []


def test_specs_and_files(complete) -> None:  # type: ignore[no-untyped-def]
    assert sorted(complete("check", "")) == ["one.dsc", "sub", "two words.dsc"]
    assert sorted(complete("check", "one.dsc", "t")) == ["two words.dsc"]
    assert sorted(complete("diff", "one.dsc", "o")) == ["one.dsc"]
    assert "notes.txt" in complete("import", "hf", "")
    assert complete("import", "") == ["hf", "megatron-bridge", "torchtitan"]


def test_keys_and_codes(complete) -> None:  # type: ignore[no-untyped-def]
    assert complete("check", "-s", "parallel.pi") == ["parallel.pipeline="]
    assert complete("train", "--set", "train.ste") == ["train.steps="]
    assert complete("check", "-s", "schedule.name", "=", "zb") == ["zb1p", "zbh2", "zbv"]
    assert complete("check", "-s", "precision", "=") == ["fp64", "fp32", "bf16", "fp8_block", "mxfp8", "nvfp4"]
    assert complete("show", "one.dsc", "parallel.d") == ["parallel.data"]
    tiles = ["precision.activation_tile=", "precision.weight_tile="]
    assert [complete("check", "-s", key[:-2]) for key in tiles] == [[key] for key in tiles], "1x128 is one value"
    assert complete("show", "one.dsc", "data.tok") == ["data.tokenizer"]
    assert complete("explain", "E080") == [code for code in CODES if code.startswith("E080")]


def test_every_proposed_key_can_be_set(line: CommandLine) -> None:
    """`-s` accepts every proposed key: an error is about its value, not the key."""
    from dsl.messages.diagnostics import SpecError

    assert len(line.keys) > 50
    of_rows = {name for optimizer in OPTIMIZERS.values() for name in optimizer.model_fields}
    of_other_optimizers = {f"train.optimizer.{name}" for name in of_rows - AdamW.model_fields.keys()}
    for key, words in line.keys.items():
        value = words[0] if words else "1"
        try:
            resolve(QUICK, overrides=[f"{key}={value}"])
        except SpecError as error:
            wrong = [item for item in error.diagnostics if item.code in ("E0201", "E0204", "E0205")]
            of_attention = key.replace("model.mtp.attention", "model.attention")
            kinds = ("rope.scaling.", "compress.")  # keys of blocks that this spec does not contain
            nested = of_attention.startswith(tuple(f"model.attention.{kind}" for kind in kinds))
            elsewhere = of_attention in {*OF_OTHERS, *of_other_optimizers, "model.attention.module"}
            elsewhere |= nested or key.startswith(("precision.", "adapter."))
            assert not wrong or elsewhere, f"{key}: {wrong}"


def test_each_shell_knows_every_command_key_and_code(line: CommandLine, capsys: pytest.CaptureFixture[str]) -> None:
    for shell, script in SHELLS.items():
        assert main(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert text == script(line)
        for command in line.commands:
            assert all(flag.lstrip("-") in text for option in command.options for flag in option.flags)
        assert all(word in text for word in (*COMMANDS, *line.keys, *line.codes))
        assert "source" in text.split("\n\n")[0]  # how it is installed


def small() -> CommandLine:
    """A command line with one argument of each kind."""
    check = argparse.ArgumentParser("dsc check", description="check a spec: it's quick")
    check.add_argument("specs", nargs="*", help="spec files; default: [one]")
    check.add_argument("-s", "--set", action="append", help="override a key: -s a=1")
    check.add_argument("--format", choices=("text", "json"), help="the format; default: text")
    check.add_argument("-o", "--out", type=Path, help="where to; default: here")
    check.add_argument("--name", help="a 'name'")
    show = argparse.ArgumentParser("dsc show", description="print values")
    show.add_argument("spec", nargs="?", help="a spec")
    show.add_argument("keys", nargs="*", help="values")
    brief = argparse.ArgumentParser("dsc import", description="from elsewhere", add_help=False)
    brief.add_argument("format", choices=("hf",), help="of what")
    brief.add_argument("path", type=Path, help="the file")
    full_line = command_line({"check": check, "show": show, "import": brief})
    return CommandLine(full_line.commands, {"a.b": (), "c.d": ("x", "y")}, ("E0101",))


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_scripts_are_pinned(shell: str, bless: bool) -> None:
    golden, text = GOLDEN / f"completion.{shell}", SHELLS[shell](small())
    if bless:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, "utf-8")
    assert text == golden.read_text("utf-8")
