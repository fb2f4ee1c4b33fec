"""Read and check the two kinds of files of `dsc place`.

A placement file says which experts each device has (compiler/ir/expert_placement.py). A load file, which a run writes,
has the tokens of each expert, with one row per layer: `{"load": [[tokens of each expert], …]}`.
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
    """The expert in each slot of a layer."""
    return np.array([expert for device in layer.devices for expert in device], dtype=np.int64)


def layer_placement(
    layer: str, physical: Ints, devices: int, moved: Sequence[ExpertMove], load: Floats | None = None
) -> LayerPlacement:
    """The entry of a layer in a placement file."""
    rows = tuple(tuple(row) for row in physical.reshape(devices, -1).tolist())
    return LayerPlacement(layer, rows, tuple(map(str, moved)), () if load is None else tuple(load.tolist()))


def read_placement(path: Path) -> Mapping[str, LayerPlacement]:
    """The layers of a placement file, by name. Raises PlacementError if the file is not valid."""
    document = read_json(path)
    try:
        layers = _layers(document)
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}", error.hint) from None
    return layers


def _layers(document: Any) -> dict[str, LayerPlacement]:
    if not isinstance(document, dict) or document.keys() != {"version", "layers"}:
        raise PlacementError('expected {"version": 1, "layers": […]}', "`dsc place RUN -o FILE` writes such a file")
    if document["version"] is not VERSION:
        version = json.dumps(document["version"])[:40]
        raise PlacementError(f"version {version} is unknown: this dsc reads version {VERSION}")
    rows = document["layers"]
    if not isinstance(rows, list) or len(rows) > MAX_LAYERS:
        raise PlacementError(f"`layers` must be a list of at most {MAX_LAYERS:,} layers")
    layers: dict[str, LayerPlacement] = {}
    for row in rows:
        layer = _layer(row)
        if layer.layer in layers:
            raise PlacementError(f"{layer.layer} is listed twice")
        layers[layer.layer] = layer
    return layers


def _layer(row: Any) -> LayerPlacement:
    if not isinstance(row, dict) or row.keys() - {"load"} != {"layer", "devices", "moves"}:
        raise PlacementError(
            'a layer must be {"layer": …, "devices": […], "moves": […], "load": […]}, and `load` is optional'
        )
    name, devices, moved, load = row["layer"], row["devices"], row["moves"], row.get("load", [])
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9.]{1,64}", name):
        raise PlacementError(f"{json.dumps(name)[:40]} is not the name of a layer, such as layers.3")
    are_lists = isinstance(devices, list) and all(isinstance(device, list) and device for device in devices) and devices
    if not are_lists or not all(_is_expert(expert) for device in devices for expert in device):
        raise PlacementError(f"{name}: `devices` must be a list of the experts of each device")
    if len({len(device) for device in devices}) > 1:
        raise PlacementError(f"{name}: every device must have the same number of experts")
    layer = LayerPlacement(name, tuple(map(tuple, devices)), tuple(moved) if isinstance(moved, list) else ())
    if "load" in row and (not isinstance(load, list) or len(load) != layer.num_experts):
        raise PlacementError(f"{name}: `load` must be the tokens of each of its {layer.num_experts} experts")
    if wrong := next((reason for value in load if (reason := wrong_tokens(value))), ""):
        raise PlacementError(f"{name}: `load`: {wrong}")
    missing = set(range(layer.num_experts)) - {expert for device in devices for expert in device}
    if missing:
        raise PlacementError(f"{name}: expert {min(missing)} is on no device")
    if not isinstance(moved, list) or not all(isinstance(move, str) for move in moved):
        raise PlacementError(f"{name}: `moves` must be a list of strings")
    for move in moved:
        _check_move(layer, move)
    return replace(layer, load=tuple(map(float, load)))


def _is_expert(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_EXPERTS


def _check_move(layer: LayerPlacement, text: str) -> None:
    """Check that a move ends on the device that has the expert by `devices`."""
    match = _MOVE.fullmatch(text)
    if match is None:
        raise PlacementError(f"{layer.layer}: {text[:60]!r} is not a move, such as 'expert 3: device 1 → device 0'")
    expert, destination = map(int, match.groups())
    if destination >= len(layer.devices) or expert not in layer.devices[destination]:
        raise PlacementError(
            f"{layer.layer}: the move {text!r} contradicts `devices`, which has expert {expert} on another device",
            "correct the move or `devices`, or remove the move",
        )


# --- Load files

MAX_BYTES = 64 << 20
MAX_LAYERS = 4096
MAX_TOKENS = 1e18  # of an expert; at a trillion tokens a day, this takes 2,700 years


def read_load(path: Path) -> tuple[Floats, ...]:
    """The tokens of each expert, one row per layer. Raises PlacementError with the place of the first mistake."""
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get("load"), list):
        raise PlacementError(f'{path}: expected {{"load": [[tokens of each expert], …]}}, with one row per layer')
    rows = document["load"]
    if not rows:
        raise PlacementError(f"{path}: `load` has no layers", "a model without experts has nothing to place")
    if len(rows) > MAX_LAYERS:
        raise PlacementError(f"{path}: {len(rows):,} layers are too many: the limit is {MAX_LAYERS:,}")
    return tuple(_row(path, index, row) for index, row in enumerate(rows))


def _row(path: Path, index: int, row: Any) -> Floats:
    if not isinstance(row, list) or not row:
        raise PlacementError(f"{path}: row {index} of `load` is not a list of tokens")
    if len(row) > MAX_EXPERTS:
        raise PlacementError(f"{path}: row {index} has {len(row):,} experts: the limit is {MAX_EXPERTS:,}")
    for expert, value in enumerate(row):
        if wrong := wrong_tokens(value):
            raise PlacementError(f"{path}: row {index}, expert {expert}: {wrong}")
    return np.array(row, dtype=np.float64)


def wrong_tokens(value: Any) -> str:
    """Why a value is not a number of tokens; "" if it is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{json.dumps(value)[:40]} is not a number"
    if not 0 <= value <= MAX_TOKENS:
        return f"{str(value)[:40]} tokens are not between 0 and {MAX_TOKENS:.0e}"
    return ""


def same_length(path: Path, rows: tuple[Floats, ...]) -> int:
    """The number of experts, which must be the same in all rows. Raises PlacementError if it differs."""
    experts = len(rows[0])
    for index, row in enumerate(rows):
        if len(row) != experts:
            raise PlacementError(
                f"{path}: row {index} has {len(row)} experts, but row 0 has {experts}",
                "if the layers of the model differ, name its spec: dsc place FILE SPEC",
            )
    return experts


def read_json(path: Path) -> Any:
    """The JSON document of a file. Raises PlacementError if it is missing, too large, or not strict JSON."""
    try:
        return json_of(read_text(path, MAX_BYTES), str(path))
    except TextFileError as error:
        raise PlacementError(str(error)) from None
