"""`dsc completion SHELL`: print a script with which a shell completes commands, options, specs, keys and codes.

dsc completion bash                in ~/.bashrc: source <(dsc completion bash)
dsc completion zsh                 in ~/.zshrc, after compinit: source <(dsc completion zsh)
dsc completion fish                in ~/.config/fish/config.fish: dsc completion fish | source

Exit codes: 0 done · 2 the command line is wrong
"""

from __future__ import annotations

import argparse

from compiler.cli.completion import SHELLS
from compiler.cli.completion.command_words import command_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(SHELLS[args.shell](command_line(args.parsers())), end="")
    return 0
