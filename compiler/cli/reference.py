"""Generates docs/reference/commands.md from the parsers of the commands."""

from __future__ import annotations

import argparse
import re

from compiler.cli import main as cli
from dsl.reference.pages import GENERATED


def commands_page() -> str:
    """The page: a table of all commands, the exit codes, and a section for each command with its arguments."""
    assert cli.__doc__
    codes = " ".join(cli.__doc__.partition("Exit codes: ")[2].split())
    rows = (f"| [{name}](#{name}) | {_cell(_usage(name))} | {_cell(line)} |" for name, line in cli.COMMANDS.items())
    parts = [
        f"{GENERATED}# Commands\n",
        "`dsc COMMAND --help` prints the same. A spec is named `SPEC` or, where its file has several runs, `SPEC:RUN`.",
        "Without a spec argument, commands use the spec in the current folder.\n",
        "| command | usage | does |\n|---|---|---|",
        *rows,
        "\n## Exit codes\n",
        "".join(f"- {code.strip().rstrip('.')}\n" for code in codes.split(" · ")),
        *(_command(name) for name in cli.COMMANDS),
    ]
    return "\n".join(parts)


def _usage(name: str) -> str:
    """The usage lines at the start of a command's docstring, up to the colon."""
    introduction = " ".join((cli.module_of(name).__doc__ or "").split("\n\n")[0].split())
    return ", ".join(re.findall(r"`dsc [^`]*`(?=[:,])", introduction))


def _command(name: str) -> str:
    module = cli.module_of(name)
    parser = argparse.ArgumentParser(prog=f"dsc {name}", add_help=False)
    module.add_arguments(parser)
    listed = [action for action in parser._actions if action.help != argparse.SUPPRESS]  # those of groups, too
    rows = (f"| {_argument_text(action)} | {_help(parser, action)} |\n" for action in listed)
    table = "| argument | is |\n| --- | --- |\n" + "".join(rows) if listed else ""
    return f"## {name}\n\n{_markdown(module.__doc__ or '')}\n\n{table}"


def _markdown(text: str) -> str:
    """A module's docstring as Markdown; a paragraph that begins with a command line is quoted as it is."""
    blocks = text.strip().split("\n\n")
    return "\n\n".join(
        f"```sh\n{block}\n```" if block.startswith("dsc ") else " ".join(block.split()) for block in blocks
    )


def _argument_text(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    takes = "" if action.nargs == 0 else f" {value}"
    return _cell(f"`{', '.join(action.option_strings) + takes}`" if action.option_strings else f"`{value}`")


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return _cell((action.help or "") % (vars(action) | {"prog": parser.prog}))


def _cell(text: str) -> str:
    """Text as a cell of a table: on one line, its bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")
