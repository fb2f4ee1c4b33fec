"""`dsc`: one command line, one lazily imported module per command.

Exit codes: 0 done · 1 a rank failed, or files differ (`diff`, `fmt --check`, `verify`) · 2 the spec, the data or the
command line is wrong · 3 a run hung, or an error of dsc itself · 4 and 5 verdicts of `replay` · 75 try again later: the
run folder is busy, the disk is full under a run, a build or stdout, or the preparation of the data was killed · 128 +
signal: stopped on request, after a checkpoint, or a process of the run was killed · 141 nobody read the output.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

# command → one line of help; the module is compiler.cli.commands.<command>, or what MODULES says, with
# add_arguments(parser) and run(args) -> int
COMMANDS = {
    "calibrate": "measure what this machine achieves, or take it from a trace, for plans to go by",
    "check": "check a spec and report every mistake in it",
    "compare": "put several runs beside each other: curves, figures, differences of their specs",
    "completion": "print a completion script for bash, zsh or fish",
    "compile": "turn a spec into a build folder: plan, schedule, proof, segments, kernels",
    "data": "show what a run trains on, as tokens; or prepare it, in several processes",
    "diff": "compare two specs: values, layers, parameters, memory, schedule",
    "doctor": "say whether this node is ready for a run, and what to mend",
    "eval": "measure the loss of a trained model on text or tokens",
    "explain": "explain an error code or a key",
    "export": "write a trained model for Hugging Face, or a plan for torchtitan, Megatron-Bridge or Chakra",
    "fmt": "format spec files",
    "generate": "write text with a trained model",
    "import": "write a spec from a published model, with its weights, or from a plan for Megatron or torchtitan",
    "init": "write a commented spec to start from",
    "inspect": "show what a run did, beside what was planned: times, errors, measured costs",
    "launch": "write the files that start a build on a cluster: torchrun, Slurm, Kubernetes, SkyPilot",
    "lsp": "serve an editor over stdin and stdout (pip install '.[lsp]')",
    "plan": "predict what a run takes before it runs: time, memory and money",
    "place": "choose which expert belongs on which device, from the load of a run",
    "replay": "train a step of a run again, and compare it bit for bit",
    "report": "write the report of a run folder",
    "schedule": "print a pipeline schedule, what it takes, and how far that is from the best",
    "show": "print a resolved spec, and where each value comes from",
    "sweep": "train a spec with every combination of several values, and compare the runs",
    "trace": "write a step of a run as Chrome trace events, for ui.perfetto.dev",
    "train": "train a spec or a build folder on this machine's processes",
    "verify": "say whether a checkpoint, a run or a build is whole, and what can load it",
    "watch": "follow a run: a live view, lines or JSON; a dashboard and alert rules",
}

MODULES = {"import": "import_", "trace": "step_trace"}  # a word of Python, and a name that others have


EPILOG = """\
`dsc COMMAND --help` says what a command takes, with examples. To begin: dsc init

exit codes: 0 done · 1 a run failed, or a check found that files differ · 2 the spec or the command line is wrong ·
3 a run hung, or an error of dsc itself · 75 a folder is busy or a disk is full · 130 interrupted · 141 nobody read the
output
"""
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell shows of other programs then


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run one command. Returns its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no reason to stop
    if sys.stdout is None:  # closed by who started us, so that nobody reads it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the next file that is opened would be stdout
        os.set_inheritable(1, True)  # dup2 leaves it as it was where the file just opened is 1 already
        sys.stdout = Closed()
    try:
        if argv is None:
            gc.disable()  # importing leaves nothing to collect; looking for it takes a tenth of the start
        args = _parsed(list(sys.argv[1:] if argv is None else argv))
        if argv is None:
            gc.freeze()
            if not getattr(args, "at_once", False):  # what it makes stays to the end: looking for cycles took a quarter
                gc.set_threshold(100_000)  # as it is, a search of plans spends a tenth of its time there
                gc.enable()
        code: int = args.run(args)
        print(end="", flush=True)
        if argv is None and getattr(args, "at_once", False):
            if sys.stderr is not None:
                with suppress(OSError):  # a full disk: what is said beside the work does not change how it ended
                    sys.stderr.flush()
            os._exit(code)  # giving every object of a large program back takes a twentieth of its compilation
        return code
    except BrokenPipeError:  # the reader of our output has left, `dsc schedule … | head`
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk under our output; commands report what befalls their own files
        _discard_output()
        from compiler.cli.commands.common import say  # only where something is wrong
        from runtime.system.outcome import refusal_code

        say(f"error: the output cannot be written: {error.strerror or error}")
        return refusal_code(error)
    except KeyboardInterrupt:
        return 130
    finally:
        if common := sys.modules.get("compiler.cli.commands.common"):  # else the command shows no progress
            common.end_progress()


class Closed(io.TextIOBase):
    """A stdout that is closed: what is written is told as if its reader had left."""

    def write(self, text: str) -> int:
        if text:
            raise BrokenPipeError
        return 0

    @property
    def buffer(self) -> NoReturn:
        raise BrokenPipeError

    def fileno(self) -> int:
        return 1


class CommandParser(argparse.ArgumentParser):
    """A parser whose mistakes end in a hint, as those of a spec do; texts are printed as they are laid out."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        from dsl.messages.diagnostics import visible

        self.exit(2, f"{visible(f'error: {message}')}\n = hint: {visible(self._hint(message))}\n")

    def _hint(self, message: str) -> str:
        """What was probably meant, or else how the command is used."""
        words = [*self._option_string_actions, *COMMANDS]
        if "invalid choice" in message:
            words += [str(choice) for action in self._actions for choice in action.choices or ()]
        quoted, options = re.findall(r"'([^']*)'", message), re.findall(r"(?<!\S)--?[\w-]+", message)
        word = (quoted or options or [""])[0]
        from difflib import get_close_matches  # only where a word is unknown

        # Dashes are left out, or short options would be near each other by these alone.
        bare = {each.lstrip("-"): each for each in words if each.startswith("-") == word.startswith("-")}
        close = [bare[each] for each in get_close_matches(word.lstrip("-"), bare, n=1, cutoff=0.6)]
        if word.endswith(".dsc"):
            return f"write `dsc check {word}` or `dsc train {word}`"
        if close and word not in words:
            return f"did you mean `{close[0]}`?"
        return f"`{self.prog} --help` says how it is used"


def module_of(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"compiler.cli.commands.{MODULES.get(name, name)}")


def command_parser(name: str) -> CommandParser:
    """The parser of a command; imports its module, and no other."""
    parser = CommandParser(f"dsc {name}", COMMANDS[name])
    module = module_of(name)
    module.add_arguments(parser)
    parser.epilog = parser.epilog or _epilog(module.__doc__ or "")
    parser.set_defaults(run=module.run, parsers=command_parsers)
    return parser


def command_parsers() -> dict[str, CommandParser]:
    """The parsers of all commands, by name."""
    return {name: command_parser(name) for name in COMMANDS}


def _epilog(text: str) -> str:
    """What a module's docstring says after its first paragraph; lines of commands are examples."""
    _, *blocks = text.strip().split("\n\n")
    shown = (
        "examples:\n" + "\n".join(f"  {line}" for line in block.splitlines()) if block.startswith("dsc ") else block
        for block in blocks
    )
    return "\n\n".join(shown)


def _parsed(arguments: list[str]) -> argparse.Namespace:
    if arguments and arguments[0] in COMMANDS:
        return command_parser(arguments[0]).parse_intermixed_args(arguments[1:])
    parser = CommandParser("dsc", "A declarative compiler for training programs.")
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
    parser.epilog = f"commands:\n{listed}\n\n{EPILOG}"
    parser.add_argument("--version", action=Version, nargs=0, help="print the version")
    parser.add_argument("command", metavar="COMMAND", help="one of those below")
    if not arguments:
        parser.print_help(sys.stderr)
        sys.exit(2)
    args = parser.parse_known_args(arguments)[0]
    if args.command in COMMANDS:
        parser.error(f"options come after the command: dsc {args.command} …")
    parser.error(f"there is no command {args.command!r}")


class Version(argparse.Action):
    """--version; the package is asked only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version  # a quarter of what dsc takes to start

        print(f"dsc {version('dsc-trainer')}")
        parser.exit()


def _discard_output() -> None:
    """So that what is buffered does not fail once more when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
