"""metrics.jsonl: one JSON object a step, appended as the run goes, whole lines only.

JSON has no NaN: such a value is null, and the row says which and what, `"not_finite": {"loss": "nan"}`. A disk that
cannot be written is reported once, and training goes on.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

NOT_FINITE = "not_finite"


class Metrics:
    """The writer. `resume_step`: rows of later steps (of the life before the resume) and a torn line are cut off."""

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self._path = path
        self._file = -1
        self._reported = False
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            os.ftruncate(self._file, _end_of(path, resume_step))
        except OSError as error:
            self._report(error)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row: `step` and whatever else, JSON but for floats that are not finite."""
        if self._file < 0:
            return
        line = (render_row(row) + "\n").encode()
        start = 0
        try:
            start = os.fstat(self._file).st_size
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            self._report(error)
            with suppress(OSError):
                os.ftruncate(self._file, start)  # no half row before the next one

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _report(self, error: OSError) -> None:
        if not self._reported:
            self._reported = True
            print(f"{self._path} cannot be written, training goes on without it: {error.strerror}", file=sys.stderr)


def render_row(row: Mapping[str, Any]) -> str:
    """One line of JSON."""
    not_finite: dict[str, str] = {}
    fields = {name: _finite(value, name, not_finite) for name, value in row.items()}
    return json.dumps(fields | ({NOT_FINITE: not_finite} if not_finite else {}), allow_nan=False)


def read_rows(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Rows from byte `start` on, and where the next one will begin. Lines that are no row are passed over."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], start
    whole = data[: data.rfind(b"\n") + 1]
    return [row for line in whole.splitlines() if (row := _row(line)) is not None], start + len(whole)


def _finite(value: Any, name: str, not_finite: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        not_finite[name] = str(value)
        return None
    if isinstance(value, Mapping):
        return {key: _finite(each, f"{name}.{key}", not_finite) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each, f"{name}.{index}", not_finite) for index, each in enumerate(value)]
    return value


def _end_of(path: Path, step: int) -> int:
    """Bytes of a metrics file up to the last row of at most `step` in an unbroken sequence of rows."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            row = _row(line)
            if row is None or row["step"] > step or not line.endswith(b"\n"):
                break
            end += len(line)
    return end


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
