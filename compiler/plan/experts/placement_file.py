"""Reads the files of `dsc place`, strictly: of a placement of experts (compiler/ir/expert_placement.py), which says
which are on which device; and of a load, as a run writes it: `{"load": [[tokens of each expert], one row a layer]}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compiler.files.text import TextFileError, json_of, read_text
from compiler.ir.expert_placement import VERSION, LayerPlacement
from compiler.plan.experts.layout import MAX_EXPERTS, ExpertMove, Floats, Ints, PlacementError

_MOVE = re.compile(r"expert (\d{1,6}): device \d{1,6} → device (\d{1,6})")


def physical_of(layer: LayerPlacement) -> Ints:
    """Slot → logical expert."""
    return np.array([expert for device in layer.devices for expert in device], dtype=np.int64)


def layer_placement(
    layer: str, physical: Ints, devices: int, moved: Sequence[ExpertMove], load: Floats | None = None
) -> LayerPlacement:
    """The entry of a layer in the file, for a placement that was found."""
    rows = tuple(tuple(row) for row in physical.reshape(devices, -1).tolist())
    return LayerPlacement(layer, rows, tuple(map(str, moved)), () if load is None else tuple(load.tolist()))


def read_placement(path: Path) -> Mapping[str, LayerPlacement]:
    """The layers of a file by their names. PlacementError says what is wrong with it."""
    document = read_json(path)
    try:
        layers = _layers(document)
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}", error.hint) from None
    return layers


def _layers(document: Any) -> dict[str, LayerPlacement]:
    if not isinstance(document, dict) or document.keys() != {"version", "layers"}:
        raise PlacementError('{"version": 1, "layers": […]} should be here', "`dsc place RUN -o FILE` writes one")
    if document["version"] is not VERSION:
        raise PlacementError(f"version {json.dumps(document['version'])[:40]} is not known, this dsc reads {VERSION}")
    rows = document["layers"]
    if not isinstance(rows, list) or len(rows) > MAX_LAYERS:
        raise PlacementError(f"`layers` is a list of at most {MAX_LAYERS:,} layers")
    found: dict[str, LayerPlacement] = {}
    for row in rows:
        layer = _layer(row)
        if layer.layer in found:
            raise PlacementError(f"{layer.layer} is there twice")
        found[layer.layer] = layer
    return found


def _layer(row: Any) -> LayerPlacement:
    if not isinstance(row, dict) or row.keys() - {"load"} != {"layer", "devices", "moves"}:
        raise PlacementError(
            'a layer is {"layer": …, "devices": […], "moves": […], "load": […]}, the load if it is known'
        )
    name, devices, moved, load = row["layer"], row["devices"], row["moves"], row.get("load", [])
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9.]{1,64}", name):
        raise PlacementError(f"{json.dumps(name)[:40]} is no name of a layer, such as layers.3")
    right = isinstance(devices, list) and all(isinstance(device, list) and device for device in devices) and devices
    if not right or not all(_is_expert(expert) for device in devices for expert in device):
        raise PlacementError(f"{name}: `devices` is a list of the experts of each device")
    if len({len(device) for device in devices}) > 1:
        raise PlacementError(f"{name}: every device has equally many experts")
    layer = LayerPlacement(name, tuple(map(tuple, devices)), tuple(moved) if isinstance(moved, list) else ())
    if "load" in row and (not isinstance(load, list) or len(load) != layer.num_experts):
        raise PlacementError(f"{name}: `load` is the tokens of each of its {layer.num_experts} experts")
    if wrong := next((said for value in load if (said := wrong_tokens(value))), ""):
        raise PlacementError(f"{name}: `load`: {wrong}")
    missing = set(range(layer.num_experts)) - {expert for device in devices for expert in device}
    if missing:
        raise PlacementError(f"{name}: expert {min(missing)} is on no device")
    if not isinstance(moved, list) or not all(isinstance(move, str) for move in moved):
        raise PlacementError(f"{name}: `moves` is a list of texts")
    for move in moved:
        _check_move(layer, move)
    return replace(layer, load=tuple(map(float, load)))


def _is_expert(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_EXPERTS


def _check_move(layer: LayerPlacement, text: str) -> None:
    """A move says where an expert is now, as `devices` do."""
    match = _MOVE.fullmatch(text)
    if match is None:
        raise PlacementError(f"{layer.layer}: {text[:60]!r} is no move, such as 'expert 3: device 1 → device 0'")
    expert, there = map(int, match.groups())
    if there >= len(layer.devices) or expert not in layer.devices[there]:
        raise PlacementError(
            f"{layer.layer}: the move {text!r} does not agree with `devices`, where expert {expert} is elsewhere",
            "edit both, or leave the move out",
        )


# ---------------------------------------------------------------- the file of a load

MAX_BYTES = 64 << 20
MAX_LAYERS = 4096
MAX_TOKENS = 1e18  # of an expert; a run of a trillion tokens a day has these in three thousand years


def read_load(path: Path) -> tuple[Floats, ...]:
    """Tokens of each expert, a row a layer. PlacementError says what is wrong with the file, and where."""
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get("load"), list):
        raise PlacementError(f'{path}: {{"load": [[tokens of each expert], …]}} should be here, a row for each layer')
    rows = document["load"]
    if not rows:
        raise PlacementError(f"{path}: there is no layer in `load`", "a model without experts has nothing to place")
    if len(rows) > MAX_LAYERS:
        raise PlacementError(f"{path}: {len(rows):,} layers are too many: at most {MAX_LAYERS:,}")
    return tuple(_row(path, index, row) for index, row in enumerate(rows))


def _row(path: Path, index: int, row: Any) -> Floats:
    if not isinstance(row, list) or not row:
        raise PlacementError(f"{path}: row {index} of `load` is no list of tokens")
    if len(row) > MAX_EXPERTS:
        raise PlacementError(f"{path}: row {index} has {len(row):,} experts, too many: at most {MAX_EXPERTS:,}")
    for expert, value in enumerate(row):
        if wrong := wrong_tokens(value):
            raise PlacementError(f"{path}: row {index}, expert {expert}: {wrong}")
    return np.array(row, dtype=np.float64)


def wrong_tokens(value: Any) -> str:
    """Why a value of a file is no number of tokens; "" where it is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{json.dumps(value)[:40]} is no number"
    if not 0 <= value <= MAX_TOKENS:
        return f"{str(value)[:40]} tokens; from 0 to {MAX_TOKENS:.0e}"
    return ""


def same_length(path: Path, rows: tuple[Floats, ...]) -> int:
    """Experts of every row; PlacementError where rows differ."""
    experts = len(rows[0])
    for index, row in enumerate(rows):
        if len(row) != experts:
            raise PlacementError(
                f"{path}: row {index} has {len(row)} experts, row 0 has {experts}",
                "of a model whose layers differ, name its spec: dsc place FILE SPEC",
            )
    return experts


def read_json(path: Path) -> Any:
    """The document of a file; PlacementError where there is none: no file, too large, not strict JSON."""
    try:
        return json_of(read_text(path, MAX_BYTES), str(path))
    except TextFileError as error:
        raise PlacementError(str(error)) from None
