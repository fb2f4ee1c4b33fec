"""Reads the model of a checkpoint from its manifest alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compiler.emit import recipe
from compiler.plan.parameters import model_parameters, stored
from dsl.schema import Model
from runtime.checkpoint.shard_manifest import Manifest
from runtime.contract.names import StoredName, has_average
from runtime.system.strict_json import tree

MAX_SHOWN = 6


class ModelError(ValueError):
    """The model of a checkpoint cannot be read, or lacks what was requested."""


def imported_meta(model: Model, model_type: str, context: int, folder: Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint imported from the published model in a folder."""
    published = {"model_type": model_type, "context": context, "name": _published_name(folder)}
    return {"plan": {"model": tree(recipe.model(model))}, "published": published}


def _published_name(folder: Path) -> str:
    """Return the name to pass to `from_pretrained`: the Hub name if the folder is in the cache of huggingface_hub, else
    the path."""
    cached = re.search(r"/models--([^/]+)/snapshots/[^/]+$", str(folder.absolute()))
    return cached[1].replace("--", "/", 1) if cached else str(folder.absolute())


def published_name(manifest: Manifest) -> str | None:
    """Return the name to pass to `from_pretrained` for an imported checkpoint; None for trained weights."""
    found = manifest.meta.get("published")
    name = found.get("name") if isinstance(found, Mapping) else None
    return name if isinstance(name, str) and name.isprintable() else None


def model_of(manifest: Manifest) -> Model:
    """The model of a checkpoint. Raises ModelError."""
    plan = manifest.meta.get("plan")
    found = plan.get("model") if isinstance(plan, Mapping) else None
    if isinstance(found, Mapping):  # keys with other values than their defaults are under "more"
        more = found.get("more")
        found = {key: value for key, value in found.items() if key != "more"} | (more if isinstance(more, dict) else {})
    try:
        model = Model.model_validate_json(json.dumps(found))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ModelError(f"its manifest has no model of this version of dsc: {where}: {first['msg']}") from None
    if model.customs:
        raise ModelError(f"no published family has the module {model.customs[0][1].module}")
    return model


def sequence_of(manifest: Manifest) -> int:
    """Tokens per sequence in the run that wrote a checkpoint; 0 if unknown."""
    value: Any = manifest.meta
    for key in ("plan", "train", "sequence"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if type(value) is int and value > 0 else 0


def check_tensors(manifest: Manifest, model: Model, *, average: bool, base: Manifest | None = None) -> None:
    """Raise ModelError unless a checkpoint holds every tensor of its model, or of its moving average (`average`).

    `base`: the manifest of the base weights, if the checkpoint holds adapters.
    """
    entries = [entry for each in (manifest, base) if each for shard in each.shards for entry in shard.entries]
    held = {entry.name: entry.shape for entry in entries}
    wanted = {stored(each): each.shape for each in model_parameters(model)}
    if average:
        if base is None:
            wanted = {StoredName(name).averaged: shape for name, shape in wanted.items()}
        if not has_average(entry.name for shard in manifest.shards for entry in shard.entries):
            raise ModelError("it has no moving average of the weights: `ema { … }` of a run keeps one")
    if wrong := [name for name, shape in wanted.items() if held.get(name) != shape]:
        more = f" and {len(wrong) - MAX_SHOWN:,} more" if len(wrong) > MAX_SHOWN else ""
        raise ModelError(f"it does not hold {', '.join(wrong[:MAX_SHOWN])}{more} as its model has them")
