"""What the commands share: the arguments that choose a spec, and loading it with every mistake reported."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from dsl.diagnostics import SpecError
from dsl.load import find, load
from dsl.schema import Spec

EXIT_SPEC = 2  # the spec or the command line is wrong
EXIT_BUG = 3  # an error of dsc itself: a schedule that its own proof refuses


@dataclass(frozen=True)
class Chosen:
    """A resolved spec and the file it came from."""

    spec: Spec
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
        path, run = _place(argument)
        return Chosen(load(path, run, tuple(overrides)), path)
    except SpecError as error:
        print(error, file=sys.stderr)
        return None


def _place(argument: str | None) -> tuple[Path, str | None]:
    if argument is None:
        return find(Path.cwd()), None
    if Path(argument).exists():
        return Path(argument), None
    path, colon, run = argument.rpartition(":")
    return (Path(path), run) if colon and path else (Path(argument), None)
