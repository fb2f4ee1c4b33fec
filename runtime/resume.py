"""Going on from a checkpoint: which one, whether this build may, and what is no longer as it was.

A checkpoint holds logical tensors, so any plan of a model loads it. Under the same build, data, torch, library of
ops, device and transport the run goes on bit for bit as if it had never ended; where one of them differs it goes on
from equal values, and that is said. Another model, or other tokens, are refused: the numbers would load and mean
something else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.build import Build
from runtime.checkpoint import Checkpoint, load
from runtime.checkpoint_manifest import CheckpointError
from runtime.native import library
from runtime.snapshot import MOMENTS

SECTIONS = ("model", "train", "mesh", "placement", "zero", "precision")  # of plan.json
# Of a model, what says how it is trained and not what it computes.
_RECIPE = re.compile(r"model\.(name|init_std|mtp\.weight.*|layers\.\d+\.ffn\.balance.*)")
ENVIRONMENT = ("torch", "ops", "device", "transport")  # what computes, and what carries messages
MAX_SHOWN = 6


@dataclass(frozen=True)
class Resumption:
    """A verified checkpoint, and what to tell the user about going on from it."""

    checkpoint: Checkpoint
    notes: tuple[str, ...]


def origin(build: Build, corpus: Path) -> dict[str, Any]:
    """What a checkpoint says of the run that writes it; JSON. `corpus`: the folder of the prepared data."""
    meta = json.loads((corpus / "meta.json").read_text("utf-8"))
    return {
        "build": build.digest,
        "torch": torch.__version__.partition("+")[0],
        "ops": library.identity(),
        "data": meta["sha256"],
        "tokenizer": meta["tokenizer"]["sha256"],
        "plan": {section: build.plan[section] for section in SECTIONS} | _placed(build.plan),
    }


def _placed(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Where the experts of each layer are, in a few letters; nothing where they are placed by their numbers."""
    slots = {row["name"]: row["slots"] for row in plan["moe_layers"] if "slots" in row}
    digests = {name: hashlib.sha256(json.dumps(row).encode()).hexdigest()[:8] for name, row in slots.items()}
    return {"experts": digests} if digests else {}


def find(folder: Path, build: Build, corpus: Path, machine: Mapping[str, str] | None = None) -> Resumption:
    """The newest good checkpoint of `folder`. CheckpointError if there is none, or if this build may not go on.

    `machine`: the `device` and `transport` that ranks will compute on and talk by.
    """
    checkpoint = load(folder)
    was, now = checkpoint.meta, json.loads(json.dumps(origin(build, corpus))) | dict(machine or {})
    changed = list(_changes(dict(_flat(was.get("plan"))), dict(_flat(now["plan"]))))
    if other := [text for path, text in changed if path.startswith("model.") and not _RECIPE.fullmatch(path)]:
        raise CheckpointError(f"{checkpoint.path} is of another model: {_listed(other)}")
    expected = expected_shapes(build.plan)
    if other := [text for _, text in _changes(checkpoint.shapes, expected)]:
        raise CheckpointError(f"{checkpoint.path} does not hold the parameters of this model: {_listed(other)}")
    if was.get("tokenizer") != now["tokenizer"]:
        raise CheckpointError(f"{checkpoint.path} was trained on the tokens of another tokenizer")
    notes = [f"newer checkpoint not used: {reason}" for reason in checkpoint.refused]
    notes.append(f"going on from {checkpoint.path}")
    differs = [text for _, text in changed]
    differs += ["other text"] if was.get("data") != now["data"] else []
    differs += [difference(was, now, name) for name in ENVIRONMENT if name in now and was.get(name) != now[name]]
    if was.get("build") != now["build"]:
        differs = differs or ["the build"]
    if differs:
        notes.append(not_bit_for_bit(differs))
    return Resumption(checkpoint, tuple(notes))


def difference(was: Mapping[str, Any], now: Mapping[str, Any], name: str) -> str:
    """What a note says of a value that differs from that of the checkpoint."""
    return f"{name} {was.get(name, 'that was not recorded')} → {now[name]}"


def not_bit_for_bit(differs: list[str]) -> str:
    """The note on a resume that goes on from equal values, yet not to equal bits."""
    return f"not bit for bit as without the break, for this differs: {_listed(differs)}"


def expected_shapes(plan: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of this plan's model."""
    parameters = {row["name"]: tuple(row["shape"]) for bucket in plan["buckets"] for row in bucket["parameters"]}
    shapes = {f"{kind}/{name}": s for kind in ("weight", *MOMENTS) for name, s in parameters.items()}
    return shapes | {f"bias/{row['name']}": tuple(row["shape"]) for row in plan["biases"]}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in a JSON value; ranges of layers are written out, one entry a layer."""
    if path == "model.layers":
        value = {i: span["ffn"] for span in value for i in range(span["first"], span["last"] + 1)}
        value = {str(i): {"ffn": ffn} for i, ffn in value.items()}
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from _flat(each, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(path, "path was → now") of what differs."""
    for path in dict.fromkeys((*was, *now)):
        if was.get(path) != now.get(path):
            yield path, f"{path} {_word(was.get(path))} → {_word(now.get(path))}"


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def _listed(texts: list[str]) -> str:
    more = len(texts) - MAX_SHOWN
    return ", ".join(texts[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
