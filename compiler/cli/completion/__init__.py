"""Shell completion scripts, generated from the command parsers, the schema and the error codes."""

from __future__ import annotations

from collections.abc import Callable

from compiler.cli.completion import bash, fish, zsh
from compiler.cli.completion.command_words import CommandLine

# shell → its script, which says in its first lines how to install it
SHELLS: dict[str, Callable[[CommandLine], str]] = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}
