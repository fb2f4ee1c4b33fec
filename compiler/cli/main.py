"""`dsc`: one command line, one lazily imported module per command.

Exit codes: 0 done · 1 a rank failed, or files differ (`diff`, `fmt --check`, `verify`) · 2 the spec, the data or the
command line is wrong · 3 a run hung, or an internal error of dsc · 4 and 5 verdicts of `replay` · 75 try again later:
the run folder is busy, the disk is full, or data preparation was killed · 128 + signal: stopped on request, after a
checkpoint, or a process of the run was killed · 141 the reader of the output closed the pipe.
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

# command → one line of help. Its module is compiler.cli.commands.<command> (exceptions: MODULES) and has
# add_arguments(parser) and run(args) -> int
COMMANDS = {
    "calibrate": "measure the rates that plans use on this machine, or derive them from a trace",
    "check": "check a spec and report every mistake in it",
    "compare": "compare several runs: curves, figures, differences of their specs",
    "completion": "print a completion script for bash, zsh or fish",
    "compile": "turn a spec into a build folder: plan, schedule, proof, segments, kernels",
    "data": "show the training data of a run as tokens, or prepare it in several processes",
    "diff": "compare two specs: values, layers, parameters, memory, schedule",
    "doctor": "check whether this node is ready for a run, and say what to fix",
    "eval": "measure the loss of a trained model on text or tokens",
    "explain": "explain an error code or a key",
    "export": "write a trained model for Hugging Face, or a plan for torchtitan, Megatron-Bridge or Chakra",
    "fmt": "format spec files",
    "generate": "write text with a trained model",
    "import": "write a spec from a published model with its weights, or from a Megatron or torchtitan configuration",
    "init": "write a commented spec to start from",
    "inspect": "compare a run with its plan: times, errors, measured costs",
    "launch": "write the files that start a build on a cluster: torchrun, Slurm, Kubernetes, SkyPilot",
    "lsp": "run the language server for editors on stdin and stdout (pip install '.[lsp]')",
    "plan": "predict the time, memory and cost of a run before it starts",
    "place": "assign experts to devices by the load measured in a run",
    "replay": "train a step of a run again and compare it bit for bit",
    "report": "write the report of a run folder",
    "schedule": "print a pipeline schedule, its cost, and its gap to the lower bound",
    "show": "print a resolved spec, and where each value comes from",
    "sweep": "train a spec with every combination of several values, and compare the runs",
    "trace": "write a step of a run as Chrome trace events, for ui.perfetto.dev",
    "train": "train a spec or a build folder on this machine's processes",
    "verify": "check that a checkpoint, a run or a build is intact, and say what can load it",
    "watch": "follow a run: a live view, lines or JSON; a dashboard and alert rules",
}

MODULES = {
    "import": "import_",
    "trace": "step_trace",
}  # `import` is a keyword of Python, `trace` a module of its library


EPILOG = """\
`dsc COMMAND --help` lists the arguments of a command, with examples. To begin: dsc init

exit codes: 0 done · 1 a run failed, or a check found that files differ · 2 the spec or the command line is wrong ·
3 a run hung, or an internal error of dsc · 75 a folder is busy or a disk is full · 130 interrupted · 141 the reader of
the output closed the pipe
"""
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report it for other programs


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run one command. Returns its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # do not fail on characters that the terminal cannot show
    if sys.stdout is None:  # the parent process closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise the next opened file becomes stdout
        os.set_inheritable(1, True)  # dup2(1, 1) does not make it inheritable
        sys.stdout = ClosedStream()
    try:
        if argv is None:
            gc.disable()  # imports leave no garbage; collecting would take a tenth of the start-up
        args = _parse_arguments(list(sys.argv[1:] if argv is None else argv))
        if argv is None:
            gc.freeze()
            if not getattr(args, "uncollected", False):  # objects live to the end: collection would take a quarter
                # Plans leave hardly any garbage, and by default a tenth of the time is spent collecting.
                gc.set_threshold(500_000)
                gc.enable()
        code: int = args.run(args)
        print(end="", flush=True)
        if argv is None and getattr(args, "at_once", False):
            if sys.stderr is not None:
                with suppress(OSError):  # a full disk under stderr does not change the exit code
                    sys.stderr.flush()
            os._exit(code)  # freeing the objects takes a twentieth of the time
        return code
    except BrokenPipeError:  # the reader closed the pipe, as in `dsc schedule … | head`
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # stdout is on a full disk; commands report errors of their own files
        _discard_output()
        from compiler.cli.commands.common import say  # imported only on errors
        from runtime.system.outcome import refusal_code

        say(f"error: the output cannot be written: {error.strerror or error}")
        return refusal_code(error)
    except KeyboardInterrupt:
        return 130
    finally:
        if common := sys.modules.get("compiler.cli.commands.common"):  # not imported: the command shows no progress
            common.end_progress()


class ClosedStream(io.TextIOBase):
    """A closed stdout: writing raises BrokenPipeError, as for a pipe without a reader."""

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
    """A parser whose errors end in a hint, like those of a spec. Help texts keep their line breaks."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        from dsl.messages.diagnostics import make_visible

        self.exit(2, f"{make_visible(f'error: {message}')}\n = hint: {make_visible(self._hint(message))}\n")

    def _hint(self, message: str) -> str:
        """The word that was probably meant, or where usage is explained."""
        words = [*self._option_string_actions, *COMMANDS]
        if "invalid choice" in message:
            words += [str(choice) for action in self._actions for choice in action.choices or ()]
        quoted, options = re.findall(r"'([^']*)'", message), re.findall(r"(?<!\S)--?[\w-]+", message)
        word = (quoted or options or [""])[0]
        from difflib import get_close_matches  # imported only for unknown words

        # Compare without dashes: short options would match by their dashes alone.
        bare = {name.lstrip("-"): name for name in words if name.startswith("-") == word.startswith("-")}
        close = [bare[name] for name in get_close_matches(word.lstrip("-"), bare, n=1, cutoff=0.6)]
        if word.endswith(".dsc"):
            return f"write `dsc check {word}` or `dsc train {word}`"
        if close and word not in words:
            return f"did you mean `{close[0]}`?"
        return f"`{self.prog} --help` explains the usage"


def module_of(name: str) -> ModuleType:
    """Import and return the module of a command."""
    return importlib.import_module(f"compiler.cli.commands.{MODULES.get(name, name)}")


def command_parser(name: str) -> CommandParser:
    """The parser of a command. Imports only the module of this command."""
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
    """A module's docstring without its first paragraph. A block of `dsc …` lines becomes the examples."""
    _, *blocks = text.strip().split("\n\n")
    paragraphs = (
        "examples:\n" + "\n".join(f"  {line}" for line in block.splitlines()) if block.startswith("dsc ") else block
        for block in blocks
    )
    return "\n\n".join(paragraphs)


def _parse_arguments(arguments: list[str]) -> argparse.Namespace:
    if arguments and arguments[0] in COMMANDS:
        return command_parser(arguments[0]).parse_intermixed_args(arguments[1:])
    parser = CommandParser("dsc", "A declarative compiler for training programs.")
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
    parser.epilog = f"commands:\n{listed}\n\n{EPILOG}"
    parser.add_argument("--version", action=Version, nargs=0, help="print the version")
    parser.add_argument("command", metavar="COMMAND", help="a command listed below")
    if not arguments:
        parser.print_help(sys.stderr)
        sys.exit(2)
    args = parser.parse_known_args(arguments)[0]
    if args.command in COMMANDS:
        parser.error(f"options come after the command: dsc {args.command} …")
    parser.error(f"there is no command {args.command!r}")


class Version(argparse.Action):
    """The option --version. Reads the package metadata only when it is used."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version  # takes a quarter of the start-up

        print(f"dsc {version('dsc-trainer')}")
        parser.exit()


def _discard_output() -> None:
    """Redirect stdout to /dev/null, so that flushing its buffer at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
