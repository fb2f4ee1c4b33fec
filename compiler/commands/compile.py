"""`dsc compile [SPEC[:RUN]] [-o BUILD]`: a spec becomes a build folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compiler.commands.common import EXIT_BUG, EXIT_SPEC, add_spec_arguments, load_spec
from compiler.proof import ProofError
from dsl.rules import train_refusals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser)
    parser.add_argument("-o", "--out", metavar="BUILD", type=Path, help="build folder; default: build/<run>")


def run(args: argparse.Namespace) -> int:
    """Compile; 0, or 2 with every mistake of the spec on stderr."""
    loaded = load_spec(args.spec, args.set)
    if loaded is None:
        return EXIT_SPEC
    if refusals := train_refusals(loaded.spec):
        print("\n\n".join(map(str, refusals)), file=sys.stderr)
        return EXIT_SPEC
    from compiler.build import compile_spec, write_build  # imports torch

    out = args.out or Path("build") / loaded.spec.name
    try:
        build = compile_spec(loaded.spec, _say)
        write_build(out, build.files)
    except (ProofError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_SPEC if isinstance(error, OSError) else EXIT_BUG
    print(build.summary, end="")
    print(f"build: {out}")
    return 0


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[Kcompile: {text}", end="", file=sys.stderr, flush=True)
