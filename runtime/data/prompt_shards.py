"""Prompts as token ids and rows: a shard in Megatron's format, and `<prefix>.rows` with a line of JSON for each prompt,
as runtime/data/prompts.py keeps it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.data.errors import DataError
from runtime.data.rewards.scoring import ANSWER
from runtime.data.shards import Reader, Tokens, Writer

NEW_LINE = 10
BLOCK = 64 << 20  # bytes


class PromptWriter:
    """Writes a shard of prompts, as a context manager. The files must not exist; all are synced at the end."""

    def __init__(self, prefix: Path, vocab: int) -> None:
        self._writer = Writer(prefix, vocab)
        self._rows = _rows_path(prefix).open("xb")
        self._unanswered, self._first_unanswered = 0, -1

    @property
    def sizes(self) -> list[int]:
        """Tokens of each prompt."""
        return self._writer.sizes

    @property
    def unanswered(self) -> dict[str, int]:
        """How many rows have no answer, and the number of the first of them, -1 where all have one."""
        return {"rows": self._unanswered, "first": self._first_unanswered}

    def __enter__(self) -> PromptWriter:
        self._writer.__enter__()
        return self

    def add(self, ids: Tokens, row: str) -> None:
        """Append a prompt: its tokens, and what is kept of its row."""
        if json.loads(row)["columns"].get(ANSWER) is None:
            self._first_unanswered = len(self.sizes) if not self._unanswered else self._first_unanswered
            self._unanswered += 1
        self._writer.add(ids)
        self._rows.write(row.encode("ascii") + b"\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._rows as stream:
            stream.flush()
            os.fsync(stream.fileno())
        self._writer.__exit__(kind, error, trace)


class PromptReader:
    """A memory-mapped shard of prompts. Raises DataError, naming the file, unless its files agree."""

    def __init__(self, prefix: Path) -> None:
        self.reader = Reader(prefix)
        path = _rows_path(prefix)
        if path.is_symlink() or not path.is_file():
            raise DataError(f"{path}: no such file of a shard")
        size = path.stat().st_size
        self._rows: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r") if size else np.zeros(0, np.uint8)
        firsts = range(0, size, BLOCK)
        ends = (np.flatnonzero(self._rows[first : first + BLOCK] == NEW_LINE) + first for first in firsts)
        self._begins = np.concatenate([np.zeros(1, np.int64), *(each + 1 for each in ends)])
        if len(self._begins) != self.num_prompts + 1 or self._begins[-1] != size:
            raise DataError(f"{path}: not {self.num_prompts} lines, one for each prompt")

    @property
    def num_prompts(self) -> int:
        return self.reader.num_documents

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Tokens of each prompt."""
        return np.diff(self.reader.starts)

    def ids(self, number: int) -> Tokens:
        """The tokens of a prompt."""
        return self.reader.document(number)

    def row(self, number: int) -> dict[str, Any]:
        """What is kept of the row of a prompt: its "prompt", a text or messages, and "columns"."""
        row: dict[str, Any] = json.loads(self._rows[self._begins[number] : self._begins[number + 1]].tobytes())
        return row


def _rows_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".rows")
