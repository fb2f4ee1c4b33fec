"""Shared by the commands: spec arguments, loading specs, error messages and progress lines."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from dsl.messages.diagnostics import Diagnostic, SpecError, make_visible, render_all

if TYPE_CHECKING:
    from compiler.machine.rates import RateTable
    from compiler.predict.choose import ChosenSpec, Patience
    from dsl.schema import Spec  # imports pydantic, which not every command needs

EXIT_DIFFERS = 1  # a check found that files differ
EXIT_SPEC = 2  # the spec or the command line is wrong
FAILURE_VERSION = 1  # of the JSON, docs/json.md
WAITS_S = (2.0, 10.0)  # seconds before the first progress line in a log, and between further ones
EXIT_BUG = 3  # an internal error of dsc: its proof refuses a program

# Colours of message lines on a terminal; `render` writes the lines.
COLOURS = (
    (r"^(error(\[\w+\])?)(?=:)", "1;31"),
    (r"^(warning(\[\w+\])?)(?=:)", "1;33"),
    (r"^ *(-->|:::) .*", "34"),
    (r"^ *\| *\^+$", "31"),
    (r"^ *= \w+(?=:)", "36"),
)


def add_spec_arguments(parser: argparse.ArgumentParser, text: str = "") -> None:
    """SPEC and -s."""
    text = text or "a spec file, or SPEC:RUN where it holds several runs; default: the spec in the current folder"
    parser.add_argument("spec", nargs="?", metavar="SPEC", help=text)
    add_overrides(parser)


def add_budget(parser: argparse.ArgumentParser) -> None:
    """--budget."""
    text = "how long the search for the values of auto may take, as in 60s or 5min; it goes on until a plan fits"
    parser.add_argument("--budget", type=_seconds, default=math.inf, metavar="TIME", help=text)


def _seconds(text: str) -> float:
    """`60s` → 60.0."""
    from dsl.facts.units import TIMES

    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([a-z]+)", text, re.ASCII)
    if match is None or match[2] not in TIMES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time, as in `60s` or `5min`")
    return float(match[1]) * float(TIMES[match[2]])


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """-s."""
    parser.add_argument(
        "-s",
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key or a `let`: -s parallel.pipeline=8, -s width=64; the learning-rate schedule, or one "
        "of its phases, counted from 0: -s 'train.rate=warmup 20 steps to 1e-3, cosine to 1e-4', "
        "-s 'train.rate.0=warmup 20 steps to 1e-3'",
    )


def load_spec(
    argument: str | None, overrides: list[str], output_format: str = "text", table: RateTable | None = None
) -> ChosenSpec | None:
    """Load the chosen spec. Return None after printing its mistakes; with `output_format` json, also as JSON on stdout.

    `table`: replaces the rate table that the spec names.
    """
    from compiler.predict.choose import choose

    try:
        chosen = choose(argument, overrides, table, progress("plan"))
    except SpecError as error:
        report_mistakes(error.diagnostics, output_format)
        return None
    say_other_phases(chosen.argument, chosen.spec)
    return chosen


def say_other_phases(argument: str, spec: Spec) -> None:
    """List the other phases of a run when a command uses only its first phase."""
    from dsl.resolve.chosen import phases_in, split

    if spec.train.within is not None:
        file, run = split(argument)
        first, *other_phases = phases_in(file, run)
        if other_phases:
            listed = ", ".join(f"{file}:{name}" for name in other_phases)
            say(f"note: this is the first phase of {first}; the others are {listed}")


def load_phases(
    argument: str | None,
    overrides: list[str],
    output_format: str = "text",
    table: RateTable | None = None,
    patience: Patience | None = None,
) -> list[ChosenSpec] | None:
    """Load all phases of the chosen run (most runs have one). Return None after printing the mistakes of all."""
    try:
        return phases_of(argument, overrides, table, patience)
    except SpecError as error:
        report_mistakes(error.diagnostics, output_format)
        return None


def phases_of(
    argument: str | None, overrides: list[str], table: RateTable | None = None, patience: Patience | None = None
) -> list[ChosenSpec]:
    """All phases of the chosen run (most runs have one). Raises SpecError with the mistakes of all.

    Says which searches for `auto` ended early.
    """
    from compiler.predict.choose import Patience, choose_phases

    phases = choose_phases(argument, overrides, table, progress("plan"), patience or Patience())
    for phase in phases:
        if phase.ranking is not None and phase.ranking.is_cut:
            from compiler.predict.search import cut_of

            say(f"note: {phase.spec.name}: {cut_of(phase.ranking)}")
    if len(phases) == 1:
        say_other_phases(phases[0].argument, phases[0].spec)
    return phases


def report_mistakes(diagnostics: Sequence[Diagnostic], output_format: str = "text") -> int:
    """Print the mistakes of specs. Returns the exit code."""
    say(render_all(tuple(diagnostics)))
    if output_format == "json":
        _print_failure(None, None, diagnostics)
    return EXIT_SPEC


def _print_failure(message: str | None, hint: str | None, diagnostics: Sequence[Diagnostic]) -> None:
    """Print the failure document of docs/json.md."""
    import json

    from dsl.text.as_json import diagnostic_value

    listed = [diagnostic_value(item) for item in diagnostics]
    document = {"version": FAILURE_VERSION, "error": message, "hint": hint or None, "diagnostics": listed}
    print(json.dumps(document, indent=2, ensure_ascii=False))


def is_refused(chosen: ChosenSpec) -> bool:
    """Whether a valid spec cannot be trained yet. Prints the reasons to stderr."""
    from compiler.predict.choose import refusals_of

    refusals = refusals_of(chosen)
    if refusals:
        say(render_all(tuple(replace(item, severity="error") for item in refusals)))
    return bool(refusals)


def report_error(message: str, hint: str = "", output_format: str = "text") -> int:
    """Print an error to stderr; with `output_format` json, also as JSON on stdout. Returns the exit code."""
    end_progress()
    say(f"error: {make_visible(message)}" + (f"\n = hint: {make_visible(hint)}" if hint else ""))
    if output_format == "json":
        _print_failure(message, hint, ())
    return EXIT_SPEC


def is_missing(folder: Path) -> bool:
    """Whether a run folder does not exist, which is printed. Other errors of the path are left to its reader."""
    try:
        folder.stat()
    except FileNotFoundError:
        report_error(
            f"there is no folder {folder}", "`dsc train` writes the run folder: runs/<run>, or the folder of --out"
        )
        return True
    except (OSError, ValueError):
        pass
    return False


def reason(error: Exception) -> str:
    """The message of an exception, without the errno of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


# ---------------------------------------------------------------- text


def say(text: str, stream: TextIO | None = None) -> None:
    """Print messages, by default to stderr. Coloured on terminals unless NO_COLOR is set (no-color.org)."""
    stream = sys.stderr if stream is None else stream
    if text and stream is not None:  # None: closed by the parent process
        try:
            print(_colour(text) if _shows_colours(stream) else text, file=stream, flush=True)
        except OSError:  # a full disk under stderr must not change the outcome
            if stream is not sys.stderr:
                raise
            sys.stderr = None  # or the interpreter would flush it again at exit


def progress(command: str, waits_s: Sequence[float] = WAITS_S) -> Callable[[str], None]:
    """Return a function that shows a progress text; pass "" to end it.

    On a terminal each text replaces the last one. Elsewhere, work that takes long prints a line, and repeats it from
    time to time. A command that ends early need not end its progress: `end_progress` does.
    """
    display = _LastLine(command) if sys.stderr is not None and sys.stderr.isatty() else _LogThread(command, waits_s)

    def tell(text: str) -> None:
        display.tell(text)
        if text:
            _open_displays.add(display)
        else:
            _open_displays.discard(display)

    return tell


def end_progress() -> None:
    """End all progress texts, when a command has ended or prints an error."""
    while _open_displays:
        _open_displays.pop().tell("")


class _LastLine:
    """Progress in the last line of a terminal."""

    def __init__(self, command: str) -> None:
        self._command, self._is_empty = command, True

    def tell(self, text: str) -> None:
        if text or not self._is_empty:
            print(f"\r\x1b[K{text and f'{self._command}: {text}'}", end="", file=sys.stderr, flush=True)
        self._is_empty = not text


class _LogThread:
    """Progress as log lines. A thread prints the last text, as one step of the work may take long."""

    def __init__(self, command: str, waits_s: Sequence[float]) -> None:
        self._command, self._waits_s = command, waits_s
        self._current = ("", 0.0)  # the text, and when it was set
        self._ended = Event()
        self._thread: Thread | None = None

    def tell(self, text: str) -> None:
        if text != self._current[0]:
            self._current = (text, monotonic())
        if text and self._thread is None:
            self._ended.clear()
            self._thread = Thread(target=self._say, daemon=True)
            self._thread.start()
        elif not text and self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def _say(self) -> None:
        previous: tuple[str, float] | None = None
        for wait_s in chain(self._waits_s, repeat(self._waits_s[-1])):
            if self._ended.wait(wait_s):
                return
            text, since = current = self._current
            say(
                f"{self._command}: {text}"
                + (f", for {monotonic() - since:.0f} s so far" if current == previous else "")
            )
            previous = current


_open_displays = set[_LastLine | _LogThread]()  # open progress displays


def _shows_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _colour(text: str) -> str:
    for pattern, colour in COLOURS:
        text = re.sub(pattern, f"\x1b[{colour}m\\g<0>\x1b[0m", text, flags=re.MULTILINE)
    return text


def human(number: float) -> str:
    """A count to four digits: `671.0B`, `7.421M`, `512`."""
    for scale, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= scale:
            return f"{number / scale:.{3 if number < 10 * scale else 2 if number < 100 * scale else 1}f}{suffix}"
    return f"{number:g}"
