"""`dsc compile [SPEC[:RUN]] [-o BUILD]`: a spec becomes a build folder.

dsc compile                        the one spec of this folder → build/<run>
dsc compile spec.dsc:ablation -o build/wide -s model.hidden=512

Exit codes: 0 done · 2 the spec is wrong or does not train yet · 3 an error of dsc: its proof refuses a program
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compiler.commands.common import EXIT_BUG, EXIT_SPEC, add_spec_arguments, is_refused, load_spec, progress, say
from compiler.emit.folder import check_place
from compiler.proof import ProofError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser)
    parser.add_argument("-o", "--out", metavar="BUILD", type=Path, help="build folder; default: build/<run>")


def run(args: argparse.Namespace) -> int:
    """Compile; 0, or 2 with every mistake of the spec on stderr."""
    loaded = load_spec(args.spec, args.set)
    if loaded is None or is_refused(loaded):
        return EXIT_SPEC
    tell = progress("compile")
    out = args.out or Path("build") / loaded.spec.name
    try:
        check_place(out)  # before the work
        from compiler.build import compile_spec, write_build  # imports torch

        build = compile_spec(loaded.spec, tell, own=loaded.own, placement=loaded.placement)
        write_build(out, build.files)
    except ProofError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BUG
    except OSError as error:
        print(f"error: {f'{out} cannot be written: {error.strerror}' if error.strerror else error}", file=sys.stderr)
        return EXIT_SPEC
    tell("")
    print(build.summary, end="", flush=True)
    if build.warning:
        say(f"warning: {build.warning}")
    print(f"build: {out}")
    return 0
