"""The initial checkpoint of a spec, checked against its model. Reads only the manifest, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiler.plan.parameters import model_parameters, stored_name
from dsl.schema import Spec
from runtime.checkpoint.shard_manifest import BASE, CheckpointError, digest, find_manifest
from runtime.contract import Initial
from runtime.contract.names import StoredName

MAX_SHOWN = 6
MAX_CONTEXT = 1 << 40
INDEXER = ".attention.indexer."  # part of the names of an indexer's parameters


class InitialError(ValueError):
    """A checkpoint that does not fit the model."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def initial_weights_for(spec: Spec, path: Path) -> Initial:
    """The checkpoint at `path`, with its digest. Raises InitialError if it lacks a parameter of the model.

    It may lack all indexers if they are trained; they are then initialized at random.
    """
    assert spec.train.initial is not None
    if spec.model.customs:
        message = "a model with custom modules cannot begin with a checkpoint: its weights are initialized at random"
        raise InitialError(message, "remove `initial`; `dsc train --resume` continues a run")
    try:
        checkpoint, manifest = find_manifest(path)
    except CheckpointError as error:
        raise InitialError(str(error), "name a checkpoint, a folder of checkpoints, or a run") from None
    if BASE in manifest.meta:
        message = f"{checkpoint} has only adapters, without the weights of the model"
        raise InitialError(message, "merge them with `dsc export hf`, and import the result with `dsc import hf`")
    shapes = {entry.name: entry.shape for shard in manifest.shards for entry in shard.entries}
    wanted = {stored_name(param): param.shape for param in model_parameters(spec.model)}
    if spec.adapter is None and not any(INDEXER in name for name in shapes):
        wanted = {name: shape for name, shape in wanted.items() if INDEXER not in name}
    wrong = [f"{StoredName(name).name} is missing" for name in wanted if name not in shapes]
    wrong += [
        f"{StoredName(name).name} is {_extents(shapes[name])}, but {_extents(shape)} in the model"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    if wrong:
        suffix = f" and {len(wrong) - MAX_SHOWN:,} more" if len(wrong) > MAX_SHOWN else ""
        message = f"{checkpoint} is of another model: {', '.join(wrong[:MAX_SHOWN])}{suffix}"
        raise InitialError(message, "`dsc verify` lists what the checkpoint has, `dsc show` what the model has")
    model_type, context = published_model(manifest.meta)
    return Initial(spec.train.initial, digest(manifest), model_type, context)


def published_model(meta: Mapping[str, Any]) -> tuple[str, int]:
    """The `model_type` and context length of the published model that a checkpoint was imported or trained from.

    They are "" and 0 if it comes from no published model.
    """
    facts = meta.get("published")
    if not isinstance(facts, dict):
        facts = meta
        for key in ("plan", "train", "initial"):
            facts = facts.get(key) if isinstance(facts, Mapping) else None
    facts = facts if isinstance(facts, Mapping) else {}
    model_type, context = facts.get("model_type"), facts.get("context")
    return (
        model_type if isinstance(model_type, str) and model_type.replace("_", "").isalnum() else "",
        context if type(context) is int and 0 <= context <= MAX_CONTEXT else 0,
    )


def _extents(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{extent:,}" for extent in shape)
