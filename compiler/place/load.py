"""The file of a load: `{"load": [[tokens of each expert], one row a layer]}`, as a run writes it, and strictly read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from compiler.place.layout import MAX_REPLICAS, Floats, PlaceError
from compiler.textfile import TextFileError, read_text

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
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PlaceError(f"{path}: row {index}, expert {expert}: {json.dumps(value)[:40]} is no number")
        if value < 0 or value > MAX_TOKENS or not math.isfinite(value):
            raise PlaceError(f"{path}: row {index}, expert {expert}: {value:.6g} tokens; from 0 to {MAX_TOKENS:.0e}")
    return np.array(row, dtype=np.float64)


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
        text = read_text(path, MAX_BYTES)
        return json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
    except TextFileError as error:
        raise PlaceError(str(error)) from None
    except json.JSONDecodeError as error:
        raise PlaceError(f"{path}:{error.lineno}:{error.colno}: this is not JSON: {error.msg}") from None
    except RecursionError:
        raise PlaceError(f"{path}: lists are nested too deep") from None
    except ValueError as error:  # a number of thousands of digits, and those of the hooks
        raise PlaceError(f"{path}: {str(error).partition(';')[0]}") from None


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`{twice[:40]}` is given twice")
    return found
