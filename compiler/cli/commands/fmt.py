"""`dsc fmt [FILE|FOLDER …] [--check] [--diff]`, `dsc fmt -`: format specs; comments and line ends stay.

Without an argument, all specs in the current folder and below are formatted. All files are read first: if one cannot
be read, or is not a spec, nothing is written.

dsc fmt                            every spec in this folder and below
dsc fmt --check specs              list files that would change; --diff shows how
dsc fmt - < spec.dsc               from stdin to stdout, as editors do

Exit codes: 0 done · 1 with --check or --diff, a file would change · 2 a file cannot be formatted
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compiler.cli.commands.common import EXIT_DIFFERS, EXIT_SPEC, report_error, say
from compiler.cli.commands.output_files import refuse_replacing, replace
from dsl.messages.diagnostics import Diagnostic, SpecError, make_visible, render_all
from dsl.resolve.files import content_of
from dsl.text.formatter import format_source
from dsl.text.parser import MAX_BYTES, decode

STDIN = "-"


@dataclass(frozen=True)
class FormattedFile:
    """A file's content and its formatted text."""

    path: str
    content: bytes
    text: str

    @property
    def differs(self) -> bool:
        return self.content != self.text.encode()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    text = "spec files, and folders with .dsc files; - formats stdin to stdout; default: the current folder"
    parser.add_argument("paths", nargs="*", metavar="PATH", help=text)
    parser.add_argument("--check", action="store_true", help="write nothing; list the files that would change")
    parser.add_argument("--diff", action="store_true", help="write nothing; show the changes")


def run(args: argparse.Namespace) -> int:
    if STDIN in args.paths:
        if args.paths != [STDIN] or args.check or args.diff:
            return report_error("`-` takes no other arguments", "write `dsc fmt - < spec.dsc`")
        return _filter()
    files: list[FormattedFile] = []
    mistakes: list[Diagnostic] = []
    for path in dict.fromkeys(_files(args.paths or ["."])):
        try:
            files.append(_format_file(path))
        except SpecError as error:
            mistakes += error.diagnostics
    if mistakes:
        return _refuse(mistakes)
    different = [file for file in files if file.differs]
    if args.check or args.diff:
        for file in different:
            print(_diff(file) if args.diff else make_visible(file.path))
        return EXIT_DIFFERS if different else 0
    refused = [fault for file in different if (fault := _error_of(refuse_replacing, file.path))]
    if refused:
        return _refuse(refused)
    for file in different:
        fault = _error_of(partial(replace, content=file.text.encode()), file.path)
        if fault:
            return _refuse([fault])
        print(f"formatted {make_visible(file.path)}")
    return 0


def _error_of(write: Callable[[Path], None], path: str) -> Diagnostic | None:
    """Call `write` and return its error, or None."""
    try:
        write(Path(path))
    except OSError as error:
        return Diagnostic("E0101", f"{path} cannot be written: {error.strerror}")
    return None


def _refuse(mistakes: list[Diagnostic]) -> int:
    say(render_all(tuple(mistakes)))
    return EXIT_SPEC


def _filter() -> int:
    """Format stdin to stdout."""
    try:
        text = _text("stdin", sys.stdin.buffer.read(MAX_BYTES + 1))
    except SpecError as error:
        return _refuse(list(error.diagnostics))
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
    return 0


def _format_file(path: str) -> FormattedFile:
    """Read and format a file. Raises SpecError. A link is refused, as it would be replaced by a file."""
    content, mistakes = content_of(path)
    if not mistakes and Path(path).is_symlink():
        mistakes = (Diagnostic("E0101", f"{path} is a symbolic link", hint="name the file it points to"),)
    if mistakes:
        raise SpecError(mistakes)
    return FormattedFile(path, content, _text(os.path.normpath(path), content))


def _text(name: str, content: bytes) -> str:
    source, mistakes = decode(name, content)
    if mistakes:
        raise SpecError(mistakes)
    return format_source(source)


def _files(paths: list[str]) -> Iterator[str]:
    """The files at `paths`, and the specs in folders, without links and hidden folders."""
    for path in paths:
        if not Path(path).is_dir():
            yield path
            continue
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for file in (Path(folder, name) for name in sorted(names) if name.endswith(".dsc")):
                if file.is_file() and not file.is_symlink():
                    yield str(file)


def _diff(file: FormattedFile) -> str:
    """The changes as a unified diff, with control characters replaced."""
    import difflib

    before, after = (text.splitlines() for text in (file.content.decode("utf-8"), file.text))
    lines = difflib.unified_diff(before, after, file.path, f"{file.path} formatted", lineterm="")
    return "\n".join(make_visible(line) for line in lines)
