"""The checkpoint that a spec's weights begin with, held to its model. Only the manifest is read: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiler.plan.parameters import model_parameters, stored
from dsl.schema import Spec
from runtime.checkpoint.manifest_file import BASE, find_manifest
from runtime.checkpoint.shard_manifest import CheckpointError, digest
from runtime.contract import Initial

MAX_SHOWN = 6
MAX_CONTEXT = 1 << 40
INDEXER = ".attention.indexer."  # in the names of its parameters


class InitialError(ValueError):
    """A checkpoint that is not one of this model."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def initial_weights_for(spec: Spec, path: Path) -> Initial:
    """The checkpoint at `path`, with its digest. Raises InitialError if a parameter of the model is not in it: but for
    indexers, of which a checkpoint may have none where they are trained. They then begin at random."""
    assert spec.train.initial is not None
    if spec.model.customs:
        message = "a model with modules of its own begins at random: what a checkpoint has of them is not looked at"
        raise InitialError(message, "remove `initial`; `dsc train --resume` goes on with a run")
    try:
        found, manifest = find_manifest(path)
    except CheckpointError as error:
        raise InitialError(str(error), "name a checkpoint, or a folder of checkpoints, or a run") from None
    if BASE in manifest.meta:
        message = f"{found} has adapters alone, not the weights that they are beside"
        raise InitialError(message, "merge them: `dsc export hf`, then `dsc import hf` of what that writes")
    held = {entry.name: entry.shape for shard in manifest.shards for entry in shard.entries}
    wanted = {stored(each): each.shape for each in model_parameters(spec.model)}
    if spec.adapter is None and not any(INDEXER in name for name in held):
        wanted = {name: shape for name, shape in wanted.items() if INDEXER not in name}
    wrong = [f"{_plain(name)} is missing" for name in wanted if name not in held]
    wrong += [
        f"{_plain(name)} is {_extents(held[name])}, in the model {_extents(shape)}"
        for name, shape in wanted.items()
        if name in held and held[name] != shape
    ]
    if wrong:
        more = f" and {len(wrong) - MAX_SHOWN:,} more" if len(wrong) > MAX_SHOWN else ""
        message = f"{found} is of another model: {', '.join(wrong[:MAX_SHOWN])}{more}"
        raise InitialError(message, "`dsc verify` says what the checkpoint has, `dsc show` what the model is")
    model_type, context = once_published(manifest.meta)
    return Initial(spec.train.initial, digest(manifest), model_type, context)


def once_published(meta: Mapping[str, Any]) -> tuple[str, int]:
    """The type and the tokens of a sequence of the published model that a checkpoint was imported from, or whose
    training it is; "" and 0 if it is of none."""
    found = meta.get("published")
    if not isinstance(found, dict):
        found = meta
        for key in ("plan", "train", "initial"):
            found = found.get(key) if isinstance(found, Mapping) else None
    found = found if isinstance(found, Mapping) else {}
    model_type, context = found.get("model_type"), found.get("context")
    return (
        model_type if isinstance(model_type, str) and model_type.replace("_", "").isalnum() else "",
        context if type(context) is int and 0 <= context <= MAX_CONTEXT else 0,
    )


def _plain(name: str) -> str:
    return name.partition("/")[2]


def _extents(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{extent:,}" for extent in shape)
