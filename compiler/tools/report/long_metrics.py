"""The rows of a run's metrics for pages that draw them. Of a long run, only some rows are read into memory.

A large file is cut into PARTS. Of each part stay its first and last row, and for each column in COLUMNS those with the
least and the greatest value, so that curves look the same. The last of them has the sums over the rows that were left
out. A million rows take about a second: extremes.c finds the rows. Without a C compiler, Python finds the same ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char_p, c_double, c_int64
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from compiler.files import native
from compiler.files.text import TextFileError, read_bytes

Row = Mapping[str, Any]
Rows = tuple[dict[str, Any], ...]
SOURCE = Path(__file__).with_name("extremes.c")
MOST_BYTES = 1 << 30  # a larger file is refused where all rows are read
WHOLE_BYTES = 16 << 20  # up to this size, all rows are drawn
PARTS = 512  # two rows of a part for each pixel of a small chart
TAIL_BYTES = 1 << 18  # the last rows all stay: the page shows means of them
LARGEST = 1e100  # as of charts
LEFT_OUT = "left_out"  # key of a row that stands for others: {"rows": 998, "step_s": 0.5, "spent_s": {…}}
STEP, PHASE, SECONDS = "step", "phase", "step_s"
DRAWN = (
    *("loss", "validation_loss", "reward", "completion_tokens", "entropy", "policy_kl", "reference_kl", "clipped"),
    *("completion_longest", "tokens_per_s", "grad_norm", "rate", "imbalance", "mtp_loss", "sequence_loss"),
    *("index_loss", "memory_bytes", "reserved_bytes"),
)
SPENT = (
    *("compute", "message", "exchange", "sum", "data", "generation", "reward", "validation", "checkpoint", "other"),
)
COLUMNS = (STEP, PHASE, SECONDS, *DRAWN, *(f"spent_s.{part}" for part in SPENT))
KEYS = b"".join(name.encode() + b"\0" for name in COLUMNS)


class StepRows(NamedTuple):
    """The rows of a file of metrics or events that have a step, and the number of other lines."""

    rows: Rows
    damaged: int


def step_rows(path: Path) -> StepRows:
    """Read all rows of metrics or events. An incomplete last line, as a killed run may leave, is ignored."""
    complete, _, _ = read_bytes(path, MOST_BYTES).rpartition(b"\n")
    return _rows_in(complete)


def drawn_rows(path: Path, starts: Collection[int] = ()) -> StepRows:
    """Read the rows of metrics that a page draws; all of a small file. Raises TextFileError.

    `starts`: steps at which ranks started; no row around them is left out, as times of failures are counted from them.
    """
    if not path.is_file() or (size := path.stat().st_size) <= WHOLE_BYTES:
        return step_rows(path)
    try:
        native.loaded(SOURCE)  # compiled by one thread
        with path.open("rb") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            cuts = _cuts(file, size)
            parts = [*pool.map(lambda cut: _part(file.fileno(), cut[0], cut[1], starts), pairwise(cuts))]
            tail = _rows_in(os.pread(file.fileno(), size - cuts[-1], cuts[-1]).rpartition(b"\n")[0])
    except OSError as error:
        raise TextFileError(f"{path}: {error.strerror}") from None
    found = [*parts, tail]
    return StepRows(tuple(row for part in found for row in part.rows), sum(part.damaged for part in found))


def left_out(row: Row) -> Row:
    """Return the sums over the rows that a row stands for; empty if it stands for itself."""
    sums = row.get(LEFT_OUT)
    return sums if isinstance(sums, Mapping) else {}


def typical(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows of which a median may be taken: of a long run those that were not chosen for their values."""
    return [row for row in rows if left_out(row)] or rows


# ---------------------------------------------------------------- parts


def _cuts(file: BinaryIO, size: int) -> list[int]:
    """Return where the parts of a file begin and the last one ends, each behind a line."""
    cuts = [0]
    for number in range(1, PARTS + 1):
        file.seek((size - TAIL_BYTES) * number // PARTS)
        file.readline()
        if cuts[-1] < file.tell() < size:
            cuts.append(file.tell())
    return cuts


@dataclass
class Extremes:
    """The number of rows of a part, and for each column the sum of its values. `places` has where the rows with the
    least and the greatest value begin, `bounds` these values."""

    num_rows: int
    places: list[int]
    bounds: list[float]
    sums: list[float]


def _part(descriptor: int, begin: int, end: int, starts: Collection[int]) -> StepRows:
    """Return the rows of a part that stay."""
    data = os.pread(descriptor, end - begin, begin)
    found = _extremes_in_c(data)
    damaged = 0
    if found is None:
        found, damaged = _extremes_in_python(data)
    least_step, greatest_step = found.bounds[0], found.bounds[1]
    step, phase = COLUMNS.index(STEP), COLUMNS.index(PHASE)
    is_one_phase = found.places[2 * phase] < 0 or found.bounds[2 * phase] == found.bounds[2 * phase + 1]
    if not found.num_rows or not is_one_phase or any(least_step - 1 <= s <= greatest_step for s in starts):
        return _rows_in(data.removesuffix(b"\n"))
    assert found.places[2 * step] >= 0, "a row has a step"
    places = sorted({place for place in found.places if place >= 0})
    rows = [json.loads(data[place : data.index(b"\n", place)]) for place in places]
    sums = {name: total - sum(_value(row, name) for row in rows) for name, total in _sums(found).items()}
    spent = {name.partition(".")[2]: value for name, value in sums.items() if "." in name and value > 0}
    rows[-1][LEFT_OUT] = {"rows": found.num_rows - len(rows), SECONDS: max(0.0, sums[SECONDS]), "spent_s": spent}
    return StepRows(tuple(rows), damaged)


def _sums(found: Extremes) -> dict[str, float]:
    """Return the sums of the columns of seconds."""
    numbers = enumerate(COLUMNS)
    return {name: found.sums[i] for i, name in numbers if name == SECONDS or name.startswith("spent_s.")}


def _rows_in(complete: bytes) -> StepRows:
    rows, damaged = [], 0
    for line in complete.split(b"\n") if complete else ():
        row = _row(line)
        if row is None:
            damaged += 1
        else:
            rows.append(row)
    return StepRows(tuple(rows), damaged)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get(STEP)) is int else None


def _extremes_in_c(data: bytes) -> Extremes | None:
    """Return the extremes; None if C is missing, or for lines that it declines."""
    if (library := native.loaded(SOURCE)) is None:
        return None
    size = len(COLUMNS)
    places, bounds = (c_int64 * (2 * size))(), (c_double * (2 * size))()
    sums, values = (c_double * size)(), (c_double * size)()
    library.extremes.restype = c_int64
    count = library.extremes(c_char_p(data), c_int64(len(data)), KEYS, c_int64(size), places, bounds, sums, values)
    return None if count < 0 else Extremes(count, [*places], [*bounds], [*sums])


def _extremes_in_python(data: bytes) -> tuple[Extremes, int]:
    """Return the extremes, and the number of lines that are no rows."""
    size = len(COLUMNS)
    found, damaged, begin = Extremes(0, [-1] * (2 * size), [0.0] * (2 * size), [0.0] * size), 0, 0
    for line in data.split(b"\n")[:-1]:
        row = _row(line)
        if row is None:
            damaged += 1
        else:
            found.num_rows += 1
            _take(found, row, begin)
        begin += len(line) + 1
    return found, damaged


def _take(found: Extremes, row: Row, begin: int) -> None:
    """Add a row that begins at `begin`."""
    for i, name in enumerate(COLUMNS):
        value = _number(row, name)
        if value is None:
            continue
        for side, sign in ((2 * i, 1), (2 * i + 1, -1)):
            if found.places[side] < 0 or sign * value < sign * found.bounds[side]:
                found.places[side], found.bounds[side] = begin, value
        found.sums[i] += _value(row, name)


def _number(row: Row, name: str) -> float | None:
    """Return the number of a column; None if it cannot be drawn."""
    value: Any = row
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if is_number else None


def _value(row: Row, name: str) -> float:
    """Return the seconds of a column; 0 if there are none, or if they are out of range."""
    value = _number(row, name)
    return value if value is not None and 0 <= value < 1e9 else 0.0


def steps_of_starts(events: Iterable[Row]) -> frozenset[int]:
    """Return the steps at which ranks started, or failed."""
    return frozenset(event[STEP] for event in events if event.get("event") in ("start", "restart", "resume"))
