"""`dsc check [SPEC[:RUN]] [-s key=value]`: is a spec right? Everything wrong with it at once; nothing is run.

Exit status: 0 it is right, 2 it is not.
"""

from __future__ import annotations

import argparse
import sys

from compiler.commands.common import EXIT_SPEC, add_spec_arguments
from dsl import load
from dsl.diagnostics import SpecError, render_all
from dsl.rules import train_refusals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser)


def run(args: argparse.Namespace) -> int:
    try:
        path = str(load.find()) if args.spec is None else args.spec
    except SpecError as error:
        print(error, file=sys.stderr)
        return EXIT_SPEC
    diagnostics = load.check(path, overrides=args.set)
    if diagnostics:
        print(render_all(diagnostics), file=sys.stderr)
        print(f"\n{len(diagnostics)} error{'s' if len(diagnostics) > 1 else ''}", file=sys.stderr)
        return EXIT_SPEC
    print(f"{path}: right")
    _warn_of_refusals(path, args.set)
    return 0


def _warn_of_refusals(path: str, overrides: list[str]) -> None:
    """Say what `dsc train` would refuse, for each run of the file."""
    file, chosen = load.split(path)
    for name in (chosen,) if chosen else load.runs_in(file):
        resolved = load.resolve(file, name, overrides)
        refusals = train_refusals(resolved.spec, resolved.origins)
        if refusals:
            print(f"\nrun {name} can be planned, not trained yet:\n\n{render_all(refusals)}")
