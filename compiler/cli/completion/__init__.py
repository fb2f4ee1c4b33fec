"""Completion scripts for shells, made from the parsers of the commands, the schema and the table of codes."""

from __future__ import annotations

from collections.abc import Callable

from compiler.cli.completion import bash, fish, zsh
from compiler.cli.completion.command_words import CommandLine

# shell → the script; each says in its first lines how it is installed
SHELLS: dict[str, Callable[[CommandLine], str]] = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}
