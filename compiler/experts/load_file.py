"""The file of a load: `{"load": [[tokens of each expert], one row a layer]}`, as a run writes it, and strictly read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from compiler.experts.layout import MAX_REPLICAS, Floats, PlaceError
from compiler.textfile import TextFileError, json_of, read_text

MAX_BYTES = 64 << 20
MAX_LAYERS = 4096
MAX_TOKENS = 1e18  # of an expert; a run of a trillion tokens a day has these in three thousand years


def read_load(path: Path) -> tuple[Floats, ...]:
    """Tokens of each expert, a row a layer. PlaceError says what is wrong with the file, and where."""
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get("load"), list):
        raise PlaceError(f'{path}: {{"load": [[tokens of each expert], …]}} should be here, a row for each layer')
    rows = document["load"]
    if not rows:
        raise PlaceError(f"{path}: there is no layer in `load`", "a model without experts has nothing to place")
    if len(rows) > MAX_LAYERS:
        raise PlaceError(f"{path}: {len(rows):,} layers are too many: at most {MAX_LAYERS:,}")
    return tuple(_row(path, index, row) for index, row in enumerate(rows))


def _row(path: Path, index: int, row: Any) -> Floats:
    if not isinstance(row, list) or not row:
        raise PlaceError(f"{path}: row {index} of `load` is no list of tokens")
    if len(row) > MAX_REPLICAS:
        raise PlaceError(f"{path}: row {index} has {len(row):,} experts, too many: at most {MAX_REPLICAS:,}")
    for expert, value in enumerate(row):
        if wrong := wrong_tokens(value):
            raise PlaceError(f"{path}: row {index}, expert {expert}: {wrong}")
    return np.array(row, dtype=np.float64)


def wrong_tokens(value: Any) -> str:
    """Why a value of a file is no number of tokens; "" where it is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{json.dumps(value)[:40]} is no number"
    if not 0 <= value <= MAX_TOKENS:
        return f"{str(value)[:40]} tokens; from 0 to {MAX_TOKENS:.0e}"
    return ""


def same_length(path: Path, rows: tuple[Floats, ...]) -> int:
    """Experts of every row; PlaceError where rows differ."""
    experts = len(rows[0])
    for index, row in enumerate(rows):
        if len(row) != experts:
            raise PlaceError(
                f"{path}: row {index} has {len(row)} experts, row 0 has {experts}",
                "of a model whose layers differ, name its spec: dsc place FILE SPEC",
            )
    return experts


def read_json(path: Path) -> Any:
    """The document of a file; PlaceError where there is none: no file, too large, not strict JSON."""
    try:
        return json_of(read_text(path, MAX_BYTES), str(path))
    except TextFileError as error:
        raise PlaceError(str(error)) from None
