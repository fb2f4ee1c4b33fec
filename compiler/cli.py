"""`dsc`: one command line, one lazily imported module per command.

Exit codes: 0 done · 1 a run failed, or a check found that files differ · 2 the spec or the command line is wrong ·
3 a run hung, or an error of dsc itself · 130 interrupted · 141 nobody read the output.
"""

from __future__ import annotations

import argparse
import importlib
import io
import keyword
import os
import sys
from collections.abc import Sequence

# command → one line of help; the module is compiler.commands.<command> (import_ for import), with
# add_arguments(parser) and run(args) -> int
COMMANDS = {
    "check": "check a spec and report every mistake in it",
    "completion": "print a completion script for bash, zsh or fish",
    "compile": "turn a spec into a build folder: plan, schedule, proof, segments, kernels",
    "diff": "what differs between two specs: values, layers, parameters, memory, schedule",
    "explain": "explain an error code or a key",
    "fmt": "format spec files",
    "import": "write a spec from a model's configuration of another format",
    "init": "write a commented spec to start from",
    "lsp": "serve an editor over stdin and stdout (pip install '.[lsp]')",
    "report": "write the report of a run folder",
    "schedule": "print a pipeline schedule of any size, without a spec",
    "show": "print a resolved spec, and where each value comes from",
    "train": "train a spec or a build folder on this machine's processes",
}


EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell shows of other programs then


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run one command. Returns its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no reason to stop
    try:
        args = _parsed(list(sys.argv[1:] if argv is None else argv))
        code: int = args.run(args)
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # the reader of our output has left, `dsc schedule … | head`
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk under our output; commands report what befalls their own files
        _discard_output()
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dsc", description="A declarative compiler for training programs.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((a for a in arguments if not a.startswith("-")), None)
    for name, line in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line)
        if name == wanted:  # only the command that runs is imported
            module = importlib.import_module(f"compiler.commands.{name}{'_' * keyword.iskeyword(name)}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser.parse_args(arguments)


def _discard_output() -> None:
    """So that what is buffered does not fail once more when the interpreter ends."""
    if sys.stdout is not None:  # closed by who started us
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
