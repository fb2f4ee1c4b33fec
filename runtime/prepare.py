"""Prepare the data of a build: `python -P -m runtime.prepare BUILD DATA_DIR OUT`.

Progress goes to stderr, one JSON object to stdout: {"folder": where the corpus is, "meta": its meta.json}. Exit codes:
0 prepared · 2 the data cannot be used. The build is the caller's to verify; no torch, which would take a second.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runtime.data.errors import DataError
from runtime.data.prepare import Progress, prepare


def main(argv: list[str]) -> int:
    folder, data, out = map(Path, argv)
    try:
        plan = json.loads((folder / "plan.json").read_text("utf-8"))
        prepared = prepare(*_inputs(plan), data, out, _stderr_progress())
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"folder": str(prepared.folder), "meta": dict(prepared.meta)}))
    return 0


def prepare_here(plan: Mapping[str, Any], data: Path, out: Path) -> Path:
    """The prepared corpus of a plan, made in this process unless it is there already."""
    return prepare(*_inputs(plan), data, out, lambda *_: None).folder


def _inputs(plan: Mapping[str, Any]) -> tuple[dict[str, Any], int, int]:
    data = dict(plan["data"])
    if isinstance(data["tokenizer"], dict):
        data["tokenizer"] = {"train": data["tokenizer"]["vocab"]}
    return data, plan["model"]["vocab"], plan["train"]["seed"]


def _stderr_progress() -> Progress:
    """A line a phase, and on a terminal the percentage while it runs."""
    live, last = sys.stderr.isatty(), 0.0

    def show(text: str) -> None:
        with suppress(OSError):  # nobody reads: the data is wanted all the same
            print(text, end="", file=sys.stderr, flush=True)

    def say(phase: str, done: int, total: int) -> None:
        nonlocal last
        text = {"read": "find text", "tokenizer": "train tokenizer", "encode": "encode text"}.get(phase, phase)
        if done >= total:
            show(f"\r\x1b[Kdata: {text}\n" if live else f"data: {text}\n")
        elif live and time.monotonic() - last > 0.1:
            last = time.monotonic()
            show(f"\r\x1b[Kdata: {text} {100 * done // max(total, 1)}%")

    return say


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
