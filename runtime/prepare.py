"""Prepare the data of a plan: `python -P -m runtime.prepare DATA_DIR OUT`.

The first line of stdin is the plan in JSON, of which the data, the model's vocabulary and the seed are needed. Progress
goes to stderr from the end of stdin on: until then somebody else says what is going on. To stdout goes an empty line as
soon as the text is found, and at last {"folder": where the corpus is, "meta": its meta.json}. Exit codes: 0 prepared ·
2 the data cannot be used. The plan is the caller's to verify; no torch, which would take a second.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runtime.data.errors import DataError
from runtime.data.prepare import prepare

PHASES = {"read": "find text", "tokenizer": "train tokenizer", "encode": "encode text"}
CLEAR = "\r\x1b[K"  # of a terminal's line


def main(argv: list[str]) -> int:
    data, out = map(Path, argv)
    told = Told()
    try:
        with open(0, "rb", buffering=0, closefd=False) as stdin:
            plan = json.loads(stdin.readline())
        prepared = prepare(*_inputs(plan), data, out, told.progress)
    except (DataError, OSError) as error:
        told.error(f"error: {error}")
        return 2
    print(json.dumps({"folder": str(prepared.folder), "meta": dict(prepared.meta)}), flush=True)
    told.rest()
    return 0


def prepare_here(plan: Mapping[str, Any], data: Path, out: Path) -> Path:
    """The prepared corpus of a plan, made in this process unless it is there already."""
    return prepare(*_inputs(plan), data, out, lambda *_: None).folder


def _inputs(plan: Mapping[str, Any]) -> tuple[dict[str, Any], int, int]:
    data = dict(plan["data"])
    if isinstance(data["tokenizer"], dict):
        data["tokenizer"] = {"train": data["tokenizer"]["vocab"]}
    return data, plan["model"]["vocab"], plan["train"]["seed"]


class Told:
    """What is said of the work: a line a phase, and on a terminal the percentage while it runs."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last = 0.0
        self._held: list[str] = []  # phases that have ended before anything may be said

    def progress(self, phase: str, done: int, total: int) -> None:
        if done >= total:
            if phase == "read":
                print(flush=True)
            self._held.append(PHASES[phase])
        if not self._held and not (self._live and time.monotonic() - self._last > 0.1):
            return
        if not select.select([0], [], [], 0)[0]:
            return
        self.rest()
        if self._live and done < total:
            self._last = time.monotonic()
            self._show(f"{CLEAR}data: {PHASES[phase]} {100 * done // max(total, 1)}%")

    def rest(self) -> None:
        """What has not been said, when it may be."""
        select.select([0], [], [])
        for phase in self._held:
            self._show(f"{CLEAR if self._live else ''}data: {phase}\n")
        self._held = []

    def error(self, text: str) -> None:
        self._show(f"{CLEAR if self._live else ''}{text}\n")

    def _show(self, text: str) -> None:
        with suppress(OSError):  # nobody reads: the data is wanted all the same
            print(text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
