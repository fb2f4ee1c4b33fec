"""JSON Lines files that a run appends to during training: metrics, traces and events.

    lines = Lines(run / "metrics.jsonl", resume_step=30, say=print)
    lines.write({"step": 31, "loss": 4.2})

A file that cannot be written (a full disk, missing permission) does not end a run: `say` is called once, and the lines
are kept in memory and written later. A resume deletes nothing: damaged lines and lines of later steps are moved to
other files next to this one.

JSON has no NaN: such a value is null, and the row has its name and value, `"not_finite": {"loss": "nan"}`.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from runtime.system.regular_files import open_regular

NOT_FINITE = "not_finite"
MOST_KEPT_BYTES = 16 << 20  # of unwritten lines: some 50,000 rows of metrics
HALF_S = 0.02  # a line that is being written grows within this time
_PIECE_BYTES = 1 << 20  # a longer line counts as damaged


def print_to_stderr(text: str) -> None:
    """Print a message to standard error, which is the log of a rank."""
    with suppress(OSError, ValueError):  # a full disk, or closed
        print(text, file=sys.stderr, flush=True)


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC: 2026-01-31T12:00:00.123Z."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonLines:
    """Appends JSON objects to the file `path`; no method raises OSError. Several threads may write.

    `resume_step`: lines with a later "step" are from before the resume. They and damaged lines are moved aside before
    the first line is written (`move_aside`). None: the file is not changed, and several processes may append to it.
    `say` gets messages for the user.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int | None = None,
        say: Callable[[str], None] = print_to_stderr,
        noun: str = "rows",
    ) -> None:
        self._path, self._resume_step, self._say, self._noun = path, resume_step, say, noun
        self._file = -1
        self._unwritten: deque[bytes] = deque()  # not written yet, oldest first
        self._unwritten_bytes = 0
        self._dropped = 0
        self._fails = False
        self._lock = threading.RLock()  # a signal handler may run in the thread that holds it
        if resume_step is not None:
            self._flush()  # reports moved lines now, so that readers find the final file

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row of JSON values, where floats may be non-finite."""
        line = (render_row(row) + "\n").encode()
        with self._lock:
            self._unwritten.append(line)
            self._unwritten_bytes += len(line)
            while self._unwritten_bytes > MOST_KEPT_BYTES:
                self._unwritten_bytes -= len(self._unwritten.popleft())
                self._dropped += 1
            self._flush()

    def close(self) -> None:
        """Try again to write the kept lines, and report how many are lost if that fails."""
        with self._lock:
            self._flush()
            if lost := len(self._unwritten) + self._dropped * self._fails:
                self._say(f"{self._path}: {lost} {self._noun} could not be written and are lost")
            self._unwritten.clear()
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _flush(self) -> None:
        """Write all kept lines, or report once why that is impossible."""
        try:
            if self._file < 0:
                self._open()
            while self._unwritten:
                _append(self._file, self._unwritten[0], shared=self._resume_step is None)
                self._unwritten_bytes -= len(self._unwritten.popleft())
        except OSError as error:
            if not self._fails:
                self._fails = True
                self._say(
                    f"{self._path} cannot be written ({error.strerror or error}): training goes on, and its"
                    f" {self._noun} are kept in memory until they can be written"
                )
            return
        if self._fails:
            lost = f", except the first {self._dropped}: memory is kept for {MOST_KEPT_BYTES >> 20} MiB"
            self._say(f"{self._path} can be written again: all {self._noun} are in it{lost if self._dropped else ''}")
            self._fails, self._dropped = False, 0

    def _open(self) -> None:
        if self._resume_step is not None and (note := move_aside(self._path, self._resume_step, self._noun)):
            self._say(note)
        self._file = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)


# ---------------------------------------------------------------- reading


class ReadRows(NamedTuple):
    """Rows that were read, and the byte at which the next one starts."""

    rows: list[dict[str, Any]]
    end: int


def read_rows(path: Path, start: int = 0) -> ReadRows:
    """Read the rows from byte `start` on. Lines that are no row are skipped.

    A row is an object with an integer "step". A file shorter than `start` was replaced, and is read from its beginning.
    A missing or unreadable file has no rows.
    """
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY, follow=True), "rb") as file:
            if os.fstat(file.fileno()).st_size < start:
                start = 0
            file.seek(start)
            data = file.read()
    except OSError:
        return ReadRows([], start)
    full_lines = data[: data.rfind(b"\n") + 1]
    rows = [row for line in full_lines.splitlines() if (row := _row(line)) is not None]
    return ReadRows(rows, start + len(full_lines))


def render_row(row: Mapping[str, Any]) -> str:
    """Return a row as one line of JSON."""
    not_finite: dict[str, str] = {}
    fields = {name: _finite(value, name, not_finite) for name, value in row.items()}
    return json.dumps(fields | ({NOT_FINITE: not_finite} if not_finite else {}), allow_nan=False)


def _finite(value: Any, name: str, not_finite: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        not_finite[name] = str(value)
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item, f"{name}.{key}", not_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{name}.{index}", not_finite) for index, item in enumerate(value)]
    return value


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


# ---------------------------------------------------------------- writing


def _append(file: int, line: bytes, *, shared: bool) -> None:
    """Append a line in one write, so that lines of several processes do not mix. An OSError leaves no partial line."""
    if shared and _ends_in_half(file):
        line = b"\n" + line
    start = os.fstat(file).st_size
    written = 0
    try:
        while written < len(line):
            written += os.write(file, line[written:])
    except OSError:
        if not shared or os.fstat(file).st_size == start + written:  # else another process has appended meanwhile
            with suppress(OSError):
                os.ftruncate(file, start)
        raise


def _ends_in_half(file: int) -> bool:
    """Whether the file ends with a partial line that a process has left.

    A file also ends like this for a moment while another process writes; then its size changes.
    """
    last_size = -1
    while (size := os.fstat(file).st_size) and os.pread(file, 1, size - 1) != b"\n":
        if size == last_size:
            return True
        last_size = size
        time.sleep(HALF_S)
    return False


def move_aside(path: Path, step: int, noun: str = "rows") -> str:
    """Move lines out of a file that a resume at `step` does not continue. Nothing is deleted.

    Lines of later steps go to metrics.1.jsonl, or to the next free number; damaged lines are appended to
    metrics.damaged.jsonl. The file is replaced atomically, after these are on disk. Return a note for the user, or "".
    An OSError leaves the file unchanged.
    """
    try:
        source = os.fdopen(open_regular(path, os.O_RDONLY), "rb")
    except FileNotFoundError:
        return ""
    with source:
        later = [fate for fate, _ in _parts(source, step) if isinstance(fate, int)]
        damaged = sum(fate == "damaged" for fate, _ in _parts(source, step))
        if not later and not damaged and _ends_whole(source):
            return ""
        return _divide(path, source, step, later, damaged, noun)


def _divide(path: Path, source: BinaryIO, step: int, later: list[int], damaged: int, noun: str) -> str:
    notes: list[str] = []
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with ExitStack() as undo:
        kept_file = _side_file(temporary, undo)
        later_file, damaged_file = kept_file, kept_file
        if later:
            place = next(p for n in range(1, 1 << 30) if not os.path.lexists(p := _side_path(path, str(n))))
            later_file = _side_file(place, undo)
            span = f"step {later[0]}" if len(later) == 1 else f"steps {min(later)} to {max(later)}"
            notes.append(f"{noun} of {span}, later than step {step}, are now in {place.name}")
        if damaged:
            place = _side_path(path, "damaged")
            damaged_file = _side_file(place, undo)
            is_one = damaged == 1
            notes.append(f"{damaged} damaged {'line is' if is_one else 'lines are'} now in {place.name}")
        for fate, piece in _parts(source, step):
            file = kept_file if fate is None else later_file if isinstance(fate, int) else damaged_file
            file.write(piece if piece.endswith(b"\n") else piece + b"\n")
        for file in dict.fromkeys((kept_file, later_file, damaged_file)):
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        undo.pop_all().close()  # closes the files without undoing anything
    return f"{path}: {'; '.join(notes)}" if notes else ""


def _side_file(path: Path, undo: ExitStack) -> BinaryIO:
    """Open a file to append to. `undo` restores its old size after an error."""
    file = os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
    before = os.fstat(file.fileno()).st_size
    undo.push(lambda kind, *_: _restore(path, file, before) if kind else file.close())
    return file


def _restore(path: Path, file: BinaryIO, size: int) -> None:
    with suppress(OSError):
        file.close()
    with suppress(OSError):
        os.truncate(path, size) if size else path.unlink()


def _side_path(path: Path, word: str) -> Path:
    return path.with_name(f"{path.stem}.{word}{path.suffix}")


def _parts(source: BinaryIO, step: int) -> Iterator[tuple[int | str | None, bytes]]:
    """Yield the lines of a file with their fate: None to keep it, "damaged", or its step if that is after `step`."""
    source.seek(0)
    torn = False  # the piece before was the beginning of this line
    while piece := source.readline(_PIECE_BYTES):
        is_whole = not torn and (len(piece) < _PIECE_BYTES or piece.endswith(b"\n"))
        row = _row(piece) if is_whole else None
        torn = len(piece) == _PIECE_BYTES and not piece.endswith(b"\n")
        yield ("damaged" if row is None else row["step"] if row["step"] > step else None), piece


def _ends_whole(source: BinaryIO) -> bool:
    size = os.fstat(source.fileno()).st_size
    return not size or os.pread(source.fileno(), 1, size - 1) == b"\n"
