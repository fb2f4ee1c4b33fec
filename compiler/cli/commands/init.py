"""`dsc init [FILE] [--from NAME]`: write a commented spec to start from, in one file, ready to train.

dsc init                           train.dsc: a small model that two processes train in a minute
dsc init mine.dsc --from quickstart
dsc init --from moe-8gpu           any spec that comes with dsc, with its imports inlined

Exit codes: 0 the file is written · 2 it exists (see --force), or cannot be written
"""

from __future__ import annotations

import argparse
from pathlib import Path

from compiler.cli.commands.common import EXIT_SPEC, report_error, say
from compiler.cli.commands.output_files import replace, write_new
from compiler.tools.templates import STARTER, names, template
from dsl.load import analyse
from dsl.messages.diagnostics import SpecError, make_visible
from dsl.rules import train_refusals

DEFAULT = "train.dsc"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("file", nargs="?", metavar="FILE", default=DEFAULT, help=f"the spec; default: {DEFAULT}")
    templates = names()
    text = f"the spec to start from: {', '.join(templates)}; default: {STARTER}"
    parser.add_argument("--from", dest="template", choices=templates, default=STARTER, metavar="NAME", help=text)
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def run(args: argparse.Namespace) -> int:
    """Write the file, and print the next commands."""
    path = Path(args.file)
    if path.suffix != ".dsc":
        return report_error(f"{args.file} is not a .dsc file", f"write {path.name or 'train'}.dsc")
    try:
        text = template(args.template, path)
        if args.force:
            replace(path, text.encode())
        else:
            write_new(path, text)
    except SpecError as error:
        say(str(error))
        return EXIT_SPEC
    except FileExistsError:
        hint = "" if args.force else "--force replaces it; or name another file: dsc init mine.dsc"
        return report_error(f"{args.file} exists" if not args.force else f"{args.file} is not a regular file", hint)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the path is not valid"
        return report_error(f"{args.file} cannot be written: {reason}")
    print(f"wrote {make_visible(args.file)}\n\n{_next_commands(args.file)}")
    return 0


def _next_commands(file: str) -> str:
    """The next commands. `dsc train` is listed only for a spec that can be trained."""
    trains = all(not train_refusals(view.spec) for view in analyse(file).views if hasattr(view.spec, "train"))
    rows = [
        (f"dsc check {file}", "check it"),
        (f"dsc show {file} --origin", "every value, and where it comes from"),
        *([(f"dsc train {file}", "compile and train it")] if trains else []),
    ]
    width = max(len(command) for command, _ in rows)
    return "\n".join(make_visible(f"  {command:<{width}}   {meaning}") for command, meaning in rows)
