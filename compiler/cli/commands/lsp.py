"""`dsc lsp`: run the language server for editors on stdin and stdout. See docs/editor.md.

dsc lsp --stdio                    what an editor starts; it ends when the editor does

Exit codes: 0 the editor stopped it · 2 pygls is not installed
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import sys

EXIT_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--stdio", action="store_true", help="passed by editors; the only transport")


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("pygls") is None:
        print("error: the language server needs pygls: pip install 'dsc-trainer[lsp]'", file=sys.stderr)
        print("  in a clone of the repository: pip install -c constraints.txt '.[lsp]'", file=sys.stderr)
        return EXIT_USAGE
    from compiler.tools.editor.server import server

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="dsc lsp: %(message)s")
    protocol = sys.stdout.buffer
    with contextlib.redirect_stdout(sys.stderr):  # stdout carries only the protocol
        server().start_io(sys.stdin.buffer, protocol)
    return 0
