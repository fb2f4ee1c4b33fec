"""Reads a text column of a parquet or Arrow file, or its rows as JSON, in a process with limits: `python -P -m
runtime.data.tables KIND BYTES MEMORY [COLUMN]`.

A page of a few bytes may expand to a billion rows, and the C++ readers of such files trust sizes. So the process has
limits on its memory and processor time, and if it ends, a DataError names the file. Its standard input is the file. Its
standard output has the length (u32, little-endian) of each text, then the text; at the end END, or FAULT and the
reason. A text has at most BYTES bytes, and the process MEMORY bytes; null is an empty text. Without a COLUMN each text
is a row as a JSON object.

`datasets` writes Arrow streams (`save_to_disk`); Arrow files, which begin with ARROW1, are read as well.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from datetime import date, time
from pathlib import Path
from typing import IO, Any

from runtime.data.files import DataError, import_extra, open_regular
from runtime.system.limits import end_with_parent, limit, memory_limit_message

LENGTH = struct.Struct("<I")
END, FAULT = 2**32 - 1, 2**32 - 2
ROWS = 64  # decoded at a time
DATA_BYTES = 4 << 30
CPU_S = 60.0  # and again for each MiB of the file: a hundred times the usual need
BYTES_OF = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}  # without decoding
MAX_SHOWN = 8  # names of columns
MAX_REASON = 2000  # characters of a reason


def texts_of_table(path: Path, column: str, max_bytes: int) -> Iterator[str]:
    """Yield the texts of a column, each of at most `max_bytes` bytes. Raises DataError if the file cannot be read."""
    return _answers(path, max_bytes, column)


def rows_of_table(path: Path, max_bytes: int) -> Iterator[str]:
    """Yield the rows as JSON objects, each of at most `max_bytes` bytes. Times and decimals become texts. Raises
    DataError if the file cannot be read, or has binary values."""
    return _answers(path, max_bytes)


def _answers(path: Path, max_bytes: int, *column: str) -> Iterator[str]:
    import_extra("pyarrow", f"{path}: to read {path.suffix}")
    words = [path.suffix.removeprefix("."), str(max_bytes), str(DATA_BYTES), *column]
    with (
        open_regular(path) as stream,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "runtime.data.tables", *words],
            stdin=stream,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield from _texts(path, process.stdout, process)
        finally:
            process.kill()


def _texts(path: Path, answer: IO[bytes], process: subprocess.Popen[bytes]) -> Iterator[str]:
    row = 0
    while len(head := answer.read(LENGTH.size)) == LENGTH.size:
        (size,) = LENGTH.unpack(head)
        if size == END:
            return
        if size == FAULT:
            raise DataError(f"{path}: {answer.read(MAX_REASON * 4).decode('utf-8', 'replace')}")
        row += 1
        content = answer.read(size)
        if len(content) < size:
            break
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError:
            raise DataError(f"{path}: row {row:,} is not UTF-8") from None
    code = process.wait()
    killed = {-signal.SIGXCPU: "it takes too much processor time", -signal.SIGKILL: memory_limit_message(DATA_BYTES)}
    reason = killed.get(code)
    raise DataError(f"{path}: cannot be read after row {row:,}: {reason or f'its reader ended with code {code}'}")


# ---------------------------------------------------------------- the process


class _TableFaultError(Exception):
    """The file cannot be read. The message is the reason."""


def main(argv: list[str]) -> int:
    kind, max_bytes, data_bytes, column = argv[0], int(argv[1]), int(argv[2]), next(iter(argv[3:]), None)
    end_with_parent()
    out = sys.stdout.buffer
    limit(resource.RLIMIT_DATA, data_bytes)
    limit(resource.RLIMIT_CPU, int(CPU_S * (1 + os.fstat(0).st_size / 2**20)))
    try:
        for row, value in enumerate(_values(kind, column), 1):
            content = b"" if value is None else value
            if len(content) > max_bytes:
                raise _TableFaultError(f"row {row:,} is longer than {max_bytes >> 20} MiB")
            out.write(LENGTH.pack(len(content)) + content)
        out.write(LENGTH.pack(END))
        out.flush()
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)
    except MemoryError:
        _say(out, memory_limit_message(data_bytes))
    except Exception as error:  # pyarrow raises ArrowInvalid, OSError and others
        lines = f"{error}".splitlines() or [type(error).__name__]
        _say(out, lines[0] if isinstance(error, _TableFaultError) else f"cannot be read as {kind}: {lines[0]}")
    return 0


def _say(stream: IO[bytes], text: str) -> None:
    stream.write(LENGTH.pack(FAULT) + text[:MAX_REASON].encode("utf-8", "replace"))
    stream.flush()


def _values(kind: str, column: str | None) -> Iterator[bytes | None]:
    import pyarrow

    source = pyarrow.PythonFile(open(0, "rb", closefd=False), mode="r")  # noqa: SIM115  # open until the process ends
    batches = _parquet(source, column) if kind == "parquet" else _arrow(source, column)
    if column is None:
        yield from _rows(batches)
        return
    for batch in batches:
        values = _decode_dictionary(batch.column(batch.schema.get_field_index(column)))
        for begin in range(0, len(values), ROWS):
            part = values.slice(begin, ROWS)
            yield from part.cast(BYTES_OF[f"{part.type}"]).to_pylist()


def _rows(batches: Iterator[Any]) -> Iterator[bytes]:
    """Yield the rows of batches, as JSON."""
    row = 0
    for batch in batches:
        for begin in range(0, len(batch), ROWS):
            part = batch.slice(begin, ROWS)
            try:
                values = part.to_pylist()
            except UnicodeDecodeError:
                raise _TableFaultError(f"a text of rows {row + 1:,} to {row + len(part):,} is not UTF-8") from None
            for values_by_name in values:
                row += 1
                yield b"{%s}" % b", ".join(_json(row, name, value) for name, value in values_by_name.items())


def _json(row: int, name: str, value: object) -> bytes:
    """Return `name: value` of a JSON object."""
    try:
        return f"{json.dumps(name)}: {json.dumps(value, default=_text)}".encode()
    except TypeError:
        raise _TableFaultError(f'row {row:,}: column "{name}" holds bytes, as of an image: leave it out') from None


def _text(value: object) -> str:
    """Return a text for a value that JSON does not support. TypeError for bytes."""
    if isinstance(value, bytes):
        raise TypeError
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _parquet(source: Any, column: str | None) -> Iterator[Any]:
    from pyarrow import parquet

    file = parquet.ParquetFile(source, pre_buffer=False)
    _check(file.schema_arrow, column)
    yield from file.iter_batches(ROWS, columns=None if column is None else [column], use_threads=False)


def _arrow(source: Any, column: str | None) -> Iterator[Any]:
    from pyarrow import ipc

    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
    _check(reader.schema, column)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        batch.validate(full=True)  # finds offsets beyond their buffer
        for begin in range(0, len(batch), ROWS):
            yield batch.slice(begin, ROWS)


def _check(schema: Any, column: str | None) -> None:
    """Raise _TableFaultError unless exactly one column has the name, and has texts. For rows, unless column names are
    unique."""
    from pyarrow import types

    if column is None:
        if duplicates := [name for name in schema.names if schema.names.count(name) > 1]:
            raise _TableFaultError(f'several columns "{duplicates[0]}"')
        return

    def holds_texts(field: Any) -> bool:
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        return f"{kind}" in BYTES_OF

    matches = [field for field in schema if field.name == column]
    if len(matches) > 1:
        raise _TableFaultError(f'several columns "{column}"')
    if not matches:
        names = [field.name for field in schema if holds_texts(field)][:MAX_SHOWN]
        raise _TableFaultError(
            f'no column "{column}"; of strings are {", ".join(names)}: write `column = "{names[0]}"`'
            if names
            else f'no column "{column}", and none of strings'
        )
    if not holds_texts(matches[0]):
        raise _TableFaultError(f'column "{column}" is of {matches[0].type}, not of strings')


def _decode_dictionary(values: Any) -> Any:
    """Decode dictionary-encoded values."""
    import pyarrow

    return values.dictionary_decode() if isinstance(values, pyarrow.DictionaryArray) else values


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
