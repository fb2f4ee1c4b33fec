"""What the commands share: the arguments that choose a spec, and loading it with every mistake reported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dsl.diagnostics import SpecError, render_all
from dsl.load import find, resolve, split
from dsl.rules import train_refusals
from dsl.schema import Spec
from dsl.source import Span

EXIT_SPEC = 2  # the spec or the command line is wrong
EXIT_BUG = 3  # an error of dsc itself: a schedule that its own proof refuses


@dataclass(frozen=True)
class Chosen:
    """A resolved spec, where its values are written, and the file it came from."""

    spec: Spec
    origins: Mapping[str, Span]
    path: Path


def add_spec_arguments(parser: argparse.ArgumentParser, text: str = "") -> None:
    """SPEC and -s."""
    text = text or "a spec file, or SPEC:RUN where it holds several runs; default: the spec in the current folder"
    parser.add_argument("spec", nargs="?", metavar="SPEC", help=text)
    parser.add_argument(
        "-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key: -s parallel.pipeline=8"
    )


def load_spec(argument: str | None, overrides: list[str]) -> Chosen | None:
    """The chosen spec; None after its mistakes have been printed to stderr."""
    try:
        file, run = split(str(find(Path.cwd())) if argument is None else argument)
        resolved = resolve(file, run, overrides)
        return Chosen(resolved.spec, resolved.origins, Path(file))
    except SpecError as error:
        print(error, file=sys.stderr)
        return None


def is_refused(chosen: Chosen) -> bool:
    """Whether a right spec is one that does not run yet; why is then on stderr."""
    refusals = train_refusals(chosen.spec, chosen.origins)
    if refusals:
        print(render_all(tuple(replace(item, severity="error") for item in refusals)), file=sys.stderr)
    return bool(refusals)
