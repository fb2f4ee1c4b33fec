"""Reads the model of a checkpoint from its manifest alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compiler.emit import recipe
from compiler.plan.parameters import model_parameters, stored_name
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
    published = manifest.meta.get("published")
    name = published.get("name") if isinstance(published, Mapping) else None
    return name if isinstance(name, str) and name.isprintable() else None


def model_of(manifest: Manifest) -> Model:
    """The model of a checkpoint. Raises ModelError."""
    plan = manifest.meta.get("plan")
    fields = plan.get("model") if isinstance(plan, Mapping) else None
    if isinstance(fields, Mapping):  # keys with other values than their defaults are under "more"
        nondefault = fields.get("more")
        fields = {key: value for key, value in fields.items() if key != "more"} | (
            nondefault if isinstance(nondefault, dict) else {}
        )
    try:
        model = Model.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise ModelError(f"its manifest has no model of this version of dsc: {path}: {first['msg']}") from None
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
    entries = [entry for source in (manifest, base) if source for shard in source.shards for entry in shard.entries]
    shapes = {entry.name: entry.shape for entry in entries}
    expected = {stored_name(parameter): parameter.shape for parameter in model_parameters(model)}
    if average:
        if base is None:
            expected = {StoredName(name).averaged: shape for name, shape in expected.items()}
        if not has_average(entry.name for shard in manifest.shards for entry in shard.entries):
            raise ModelError("it has no moving average of the weights: `ema { … }` of a run keeps one")
    if mismatched := [name for name, shape in expected.items() if shapes.get(name) != shape]:
        omitted = f" and {len(mismatched) - MAX_SHOWN:,} more" if len(mismatched) > MAX_SHOWN else ""
        raise ModelError(f"it does not hold {', '.join(mismatched[:MAX_SHOWN])}{omitted} as its model has them")
