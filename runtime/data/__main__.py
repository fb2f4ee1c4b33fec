"""Prepares the data of a run: `python -P -m runtime.data.__main__ DATA_DIR OUT [--cache DIR] [--resume]`.

The first line of stdin is a DataRequest in JSON (runtime/contract/plan.py), which the caller has verified. Progress
goes to stderr after stdin has ended: until then the caller shows its own. Stdout gets an empty line as soon as the text
is found, and at the end {"folder": folder of the corpus, "meta": its meta.json}. Exit codes: 0 prepared · 2 the data
cannot be used · 75 the same, for a temporary reason such as a full disk. Importing torch would take a second, so this
process does without.

With --resume, data named by the checkpoints next to OUT is used without reading the text, if its data block is the
same.
"""

from __future__ import annotations

import argparse
import json
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from runtime.contract import DataRequest
from runtime.data.blended import prepare_data
from runtime.data.files import DataError, MissingError, open_regular, path_start_hint
from runtime.data.prepare import PHASES
from runtime.system.outcome import printable, refusal_code

MAX_MANIFEST_BYTES = 256 << 20
CLEAR = "\r\x1b[K"  # clears the line of a terminal


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.data.__main__", allow_abbrev=False)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)
    resumed = data_of_checkpoints(args.out.parent / "checkpoints") if args.resume else ()
    notes = Notes()
    try:
        with open(0, "rb", buffering=0, closefd=False) as stdin:
            request = DataRequest.from_json(stdin.readline())
        prepared = prepare_data(
            request, args.data, args.out, notes.progress, notes.note, cache=args.cache, resumed=resumed
        )
    except (DataError, OSError) as error:
        notes.error(f"error: {printable(str(error))}")
        if isinstance(error, MissingError):
            notes.error(f" = hint: {path_start_hint(args.data)}")
        return refusal_code(error)
    notes.report_found()
    print(json.dumps({"folder": str(prepared.folder), "meta": dict(prepared.meta)}), flush=True)
    notes.show_waiting()
    return 0


def prepare_here(request: DataRequest, data: Path, out: Path, resume: bool, say: Callable[[str], None]) -> Path:
    """Return the folder of the prepared corpus, preparing it in this process if needed. `resume`: as --resume."""
    resumed = data_of_checkpoints(out.parent / "checkpoints") if resume else ()
    printed: set[str] = set()

    def say_once(text: str) -> None:
        if text not in printed:
            printed.add(text)
            say(f"data: {printable(text)}")

    try:
        return prepare_data(request, data, out, lambda *_: None, say_once, resumed=resumed).folder
    except MissingError as error:
        raise DataError(f"{error}: {path_start_hint(data)}") from None


def data_of_checkpoints(folder: Path) -> tuple[str, ...]:
    """Return the sha256 of the data that the manifests of checkpoints name, newest first.

    They are only candidates: the resuming run verifies the checkpoint and its data.
    """
    serials: dict[str, int] = {}
    for path in folder.glob("[!.]*/manifest.json"):
        try:
            with open_regular(path) as stream:
                manifest = json.loads(stream.read(MAX_MANIFEST_BYTES))
            name, serial = manifest["meta"]["data"], manifest["serial"]
        except (DataError, OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(name, str) and isinstance(serial, int):
            serials[name] = max(serial, serials.get(name, serial))
    return tuple(sorted(serials, key=lambda name: -serials[name]))


class Notes:
    """Messages about the preparation: a line per phase, and on a terminal the percentage while it runs."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last = 0.0
        self._is_found = False
        self._notes: set[str] = set()
        self._waiting: list[str] = []  # lines that wait until this process may write

    def progress(self, phase: str, done: int, total: int) -> None:
        if done >= total:
            if phase == "read":
                self.report_found()
            self._waiting.append(PHASES[phase])
        if not self._waiting and not (self._live and time.monotonic() - self._last > 0.1):
            return
        if not self._may_talk():
            return
        self.show_waiting()
        if self._live and done < total:
            self._last = time.monotonic()
            self._show(f"{CLEAR}data: {PHASES[phase]} {100 * done // max(total, 1)}%")

    def note(self, text: str) -> None:
        """Show a note that belongs to no phase. Repeated notes are shown once."""
        if text not in self._notes:
            self._notes.add(text)
            self._waiting.append(printable(text))
        if self._waiting and self._may_talk():
            self.show_waiting()

    def report_found(self) -> None:
        """Tell the launcher, once, that the text is found or not needed."""
        if not self._is_found:
            self._is_found = True
            print(flush=True)

    def _may_talk(self) -> bool:
        return bool(select.select([0], [], [], 0)[0])

    def show_waiting(self) -> None:
        """Wait until this process may write, then show the waiting lines."""
        select.select([0], [], [])
        for line in self._waiting:
            self._show(f"{CLEAR if self._live else ''}data: {line}\n")
        self._waiting = []

    def error(self, text: str) -> None:
        self._show(f"{CLEAR if self._live else ''}{text}\n")

    def _show(self, text: str) -> None:
        with suppress(OSError):  # stderr is closed: prepare the data anyway
            print(text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
