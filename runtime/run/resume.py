"""Resuming from a checkpoint: which one, whether this build may resume from it, and what has changed since.

A checkpoint holds logical tensors, so any plan of a model can load it. With the same build, data, torch, library of ops
and device, the run continues bit for bit as if it had never ended, on any machines. If one of them differs, it
continues from equal values, and a note says so. Another model or another tokenizer is refused: its numbers would load
but mean something else.

A manifest is untrusted text: it is validated before it is used, and made printable before it is shown.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.build.build import Build
from runtime.build.run_copy import program_digest
from runtime.checkpoint.publish import MANIFEST, LoadedCheckpoint, load
from runtime.checkpoint.shard_manifest import CheckpointError, digest, find_manifest
from runtime.contract import MoeLayer, RecipeRatePhase, RunPlan
from runtime.contract.names import AVERAGE, BIAS, TABLE, WEIGHT, StoredName, has_average
from runtime.contract.rate import batch_at, learning_rate
from runtime.contract.weights import is_adapter
from runtime.data.files import path_start_hint
from runtime.data.position import Position
from runtime.observe.health import record
from runtime.observe.health.judge import RecentSteps
from runtime.ops.native import library
from runtime.run.phases import begins_with, check_is_not_over, later_phase_hint
from runtime.run.starting_position import course_notes, order_of, resume_position
from runtime.system.outcome import printable
from runtime.system.strict_json import FormError, read, tree

SECTIONS = ("model", "train", "mesh", "placement", "zero", "precision")  # of plan.json
# Fields of a model that define how it is trained, not what it computes.
_RECIPE = re.compile(r"model\.(name|init_std|mtp\.weight.*|layers\.\d+\.ffn\.balance.*|.*attention\.indexer\.loss)")
# Fields of a model that may differ between phases, and fields of a plan that always do.
_ROTATION = re.compile(r"model\.(layers\.\d+\.)?attention\.rope\..*")
_OF_A_PHASE = re.compile(rf"{_RECIPE.pattern}|{_ROTATION.pattern}")
_OF_EACH_PHASE = re.compile(rf"train\.(within|rate|tokens)(\..*)?|model\.name|{_ROTATION.pattern}")
_OF_THE_DATA = re.compile(r"train\.(batch|sequence|seed|tokens|rate)(\..*)?")
_OF_MESSAGES = re.compile(r"train\.grpo\.rewards\.\d+\.named")  # fields without effect on training
ENVIRONMENT = ("torch", "ops", "device")  # of the computation
MAX_SHOWN, _MAX_WORD = 6, 200
_MAX_LAYERS, _MAX_VALUES, _MAX_COUNT = 10_000, 1_000_000, 1 << 62  # limits for the plan in a manifest


@dataclass(frozen=True)
class Resumption:
    """A verified checkpoint, the position in the data after it, and notes for the user about resuming from it."""

    checkpoint: LoadedCheckpoint
    position: Position
    recent: RecentSteps
    notes: tuple[str, ...]


def origin(build: Build, corpus: Path, device: str) -> dict[str, Any]:
    """Return what a checkpoint records about its run, as JSON. `corpus`: the folder of the prepared data."""
    meta = json.loads((corpus / "meta.json").read_text("utf-8"))
    return {
        "build": build.digest,
        "programs": program_digest(build.files),
        "torch": torch.__version__.partition("+")[0],
        "ops": library.identity(),
        "device": device,
        "data": meta["sha256"],
        "tokenizer": meta["tokenizer"]["sha256"],
        "plan": {section: tree(getattr(build.plan, section)) for section in SECTIONS} | _optional_parts(build.plan),
    }


def _optional_parts(plan: RunPlan) -> dict[str, Any]:
    """Return the optional parts of a plan: adapters, and a short digest of any placement of experts that is not in
    order."""
    slots = {
        layer.name: layer.slots for layer in plan.moe_layers if [*(layer.slots or ())] != sorted(layer.slots or ())
    }
    digests = {name: hashlib.sha256(json.dumps(row).encode()).hexdigest()[:8] for name, row in slots.items()}
    adapter = {"adapter": tree(plan.adapter)} if plan.adapter else {}
    return adapter | ({"experts": digests} if digests else {})


def find(folder: Path, build: Build, corpus: Path, device: str) -> Resumption:
    """Return the newest valid checkpoint of `folder`. CheckpointError if there is none, or if this build cannot resume
    from it.

    `device`: the device of the ranks.
    """
    checkpoint = load(folder)
    saved, current = checkpoint.meta, json.loads(json.dumps(origin(build, corpus, device)))
    begins = begins_with(checkpoint, build.plan)
    check_is_not_over(checkpoint, build.plan)
    with _convert_value_error(checkpoint):
        changed = list(_changes(_flatten_plan(saved.get("plan")), _flatten_plan(current["plan"])))
    free = _OF_A_PHASE if begins else _RECIPE
    if differences := [text for path, text in changed if path.startswith("model.") and not free.fullmatch(path)]:
        back = later_phase_hint(checkpoint, build.plan)
        raise CheckpointError(f"{checkpoint.path} belongs to another model: {_join_texts(differences)}{back}")
    of_weights = [text for path, text in changed if path.startswith("adapter.") or path == "train.initial.sha256"]
    if build.plan.adapter and of_weights:
        raise CheckpointError(f"{checkpoint.path} holds adapters for other weights: {_join_texts(of_weights)}")
    shapes, expected = checkpoint.shapes, expected_shapes(build.plan)
    averaged, averages = has_average(shapes), has_average(expected)
    if averaged != averages:
        shapes, expected = (
            {name: shape for name, shape in table.items() if StoredName(name).kind != AVERAGE}
            for table in (shapes, expected)
        )
    if differences := [text for _, text in _changes(shapes, expected)]:
        raise CheckpointError(
            f"{checkpoint.path} does not hold the parameters of this model: {_join_texts(differences)}"
        )
    if saved.get("tokenizer") != current["tokenizer"]:
        raise CheckpointError(f"{checkpoint.path} was trained on the tokens of another tokenizer")
    with _convert_value_error(checkpoint):
        _check_loads(saved.get("loads"), build.plan.moe_layers)
        recent = RecentSteps.from_json(saved.get("health"))
        position, notes = resume_position(
            checkpoint, build, order_of(build, corpus), same_text=saved.get("data") == current["data"]
        )
    notes += ["the checkpoint has no moving average of the weights: it begins with them"] * (averages and not averaged)
    notes += ["the moving average of the checkpoint is not used"] * (averaged and not averages)
    differs = [] if begins else [text for _, text in changed]
    differs += ["other text"] if saved.get("data") != current["data"] else []
    differs += [difference(saved, current, name) for name in ENVIRONMENT if saved.get(name) != current[name]]
    if begins:
        notes.append(_phase_start_note(checkpoint.step, build.plan, changed))
    elif saved.get("build") != current["build"] and saved.get("programs") != current["programs"]:
        differs = differs or ["the build"]
    if not begins:
        batch = batch_at(build.plan.batches, build.plan.train.sequence, position.tokens)
        notes += _rate_notes(saved, build.plan, position.tokens, batch * build.plan.train.sequence)
    if saved.get("data") != current["data"] or any(_OF_THE_DATA.fullmatch(path) for path, _ in changed):
        notes += course_notes(checkpoint.step, position, build.plan)
    if differs:
        notes.append(inexact_resume_note(differs))
    notes = [f"going on from {checkpoint.path}", *notes]
    notes = [*(f"newer checkpoint not used: {reason}" for reason in checkpoint.refused), *notes]
    return Resumption(checkpoint, position, recent, tuple(map(printable, notes)))


def _phase_start_note(step: int, plan: RunPlan, changed: Sequence[tuple[str, str]]) -> str:
    """Return the note on the start of a phase: its number, and what differs from the phase before."""
    within = plan.train.within
    assert within is not None
    notes = [text for path, text in changed if not _OF_EACH_PHASE.fullmatch(path)]
    notes += ["the rotation of positions"] * any(_ROTATION.fullmatch(path) for path, _ in changed)
    changes = _join_texts(notes) or "nothing differs"
    return f"phase {within.number} of {within.phases} begins after step {step:,}: {changes}"


@dataclass(frozen=True)
class _SavedRates:
    """The learning rate of a plan, as a checkpoint records it."""

    rate: tuple[RecipeRatePhase, ...]


def _rate_notes(was: Mapping[str, Any], plan: RunPlan, tokens: int, step_tokens: int) -> list[str]:
    """Return a note if the learning rate of the next step differs from that in the plan before, for example because
    another number of steps stretches its phases. `step_tokens`: tokens of the next step."""
    train = was.get("plan", {}).get("train")
    written = train.get("rate") if isinstance(train, dict) else None
    if written is None or written == tree(plan.train.rate):
        return []
    with suppress(FormError, ArithmeticError, IndexError):
        before = learning_rate(
            read(_SavedRates, json.dumps({"rate": written}), "a learning rate").rate, tokens + step_tokens
        )
        after = learning_rate(plan.train.rate, tokens + step_tokens)
        if not math.isclose(before, after, rel_tol=1e-9):
            return [
                f"the learning rate of the next step is {after:.3g}, and was {before:.3g} in the previous plan: the "
                f"values of `rate` after {tokens:,} tokens have changed"
            ]
    return []


def initial_weights(plan: RunPlan, folder: Path) -> tuple[LoadedCheckpoint | None, list[str]]:
    """Return the verified checkpoint of the initial weights, if the spec names one, and notes about it.

    `folder`: paths of the spec are relative to it. CheckpointError if it is not the checkpoint that was compiled.
    """
    if (named := plan.train.initial) is None:
        return None, []
    try:
        path, manifest = find_manifest(folder / named.path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {path_start_hint(folder)}") from None
    if digest(manifest) != named.sha256:
        raise CheckpointError(f"{path} differs from the checkpoint that was compiled: compile the spec again")
    checkpoint = load(path)
    notes = [f"the weights begin with those of {path}"]
    rows = (parameter for bucket in (*plan.buckets, *plan.frozen) for parameter in bucket.parameters)
    wanted = {StoredName.of(WEIGHT, parameter.name) for parameter in rows} | {
        tensor.stored for tensor in plan.untrained
    }
    stored = [name for name in map(StoredName, checkpoint.shapes) if name.kind in (WEIGHT, BIAS, TABLE)]
    if unused := [name.name for name in stored if name not in wanted]:
        notes.append(f"tensors of the checkpoint that the model does not have: {_join_texts(unused)}")
    missing = (name.name for name in wanted - {*stored} if name.kind == WEIGHT)
    if new := sorted(name for name in missing if not is_adapter(name)):  # adapters always start anew
        notes.append(f"tensors initialized at random, because the checkpoint does not have them: {_join_texts(new)}")
    return checkpoint, [printable(note) for note in notes]


@contextmanager
def _convert_value_error(checkpoint: LoadedCheckpoint) -> Iterator[None]:
    """Raise a ValueError of the block as a CheckpointError that names the manifest."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path / MANIFEST}: {error}") from None


def _check_loads(loads: Any, layers: Sequence[MoeLayer]) -> None:
    """Raise ValueError if `loads` does not have the token counts of every expert of these layers."""
    sizes = {layer.name: layer.experts for layer in layers}
    sound = isinstance(loads, dict) and loads.keys() == sizes.keys()
    for name, row in loads.items() if sound else ():
        counts = isinstance(row, list) and all(type(n) is int and 0 <= n <= _MAX_COUNT for n in row)
        sound = sound and counts and len(row) == sizes[name]
    if not sound:
        raise ValueError("the loads of experts do not match this model")


def text_of(corpus: Path) -> str:
    """Return the digest of the tokens of a prepared corpus."""
    return str(json.loads((corpus / "meta.json").read_text("utf-8"))["sha256"])


def skip_bad_batches(run: Path, position: Position, corpus: Path) -> tuple[Position, str]:
    """Return the position without the recorded bad batches of a run, and a note about it."""
    data = text_of(corpus)
    ahead = [span for span in record.read(run, record.identity(position, data)) if span[1] > position.next]
    if not ahead:
        return position, f"no batch to skip: {run / record.FILE} has none that is ahead in this data"
    spans = ", ".join(f"{first:,} to {end - 1:,}" for first, end in ahead)
    return position.skipping(ahead), f"samples {spans} are left out"


# ---------------------------------------------------------------- differences


def difference(was: Mapping[str, Any], current: Mapping[str, Any], name: str) -> str:
    """Return the words of a note for a value that differs from the checkpoint."""
    return f"{name} {_printable_value(was[name]) if name in was else 'that was not recorded'} → {current[name]}"


def inexact_resume_note(differs: list[str]) -> str:
    """Return the note on a resume that starts from equal values but will not give equal bits."""
    return f"not bit for bit as without the break, because this differs: {_join_texts(differs)}"


def expected_shapes(plan: RunPlan) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a checkpoint of this plan: of its model, or of adapters alone."""
    kinds = (WEIGHT, *([AVERAGE] if plan.train.ema else []))
    shapes: dict[str, tuple[int, ...]] = {
        StoredName.of(kind, parameter.name): parameter.shape
        for bucket in plan.buckets
        for kind in (*kinds, *(tensor.name for tensor in plan.optimizer.state_of(bucket)))
        for parameter in bucket.parameters
    }
    return shapes | {tensor.stored: tensor.shape for tensor in plan.untrained if not plan.frozen}


def _flatten_plan(plan: Any) -> dict[str, Any]:
    """Return dotted path → value for a whole plan, with a path for each layer. ValueError if there are too many
    values."""
    values: dict[str, Any] = {}
    stack: list[tuple[str, Any]] = [("", plan)]
    while stack:
        path, value = stack.pop()
        # derived from other values
        if path in ("mesh.sq", "train.optimizer.rest.kind"):
            continue
        if path in ("train.optimizer.settings", "train.optimizer.rest.settings"):  # keys of the optimizer in a spec
            path = "train.optimizer"
        if path == "model.layers":
            value = {str(i): parts for i, parts in _layers(value).items()}
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            stack += reversed([(f"{path}.{key}" if path else str(key), element) for key, element in items])
        else:
            values[path] = value
        if len(values) + len(stack) > _MAX_VALUES:
            raise ValueError(f"its plan has more than {_MAX_VALUES:,} values")
    return values


def _layers(spans: Any) -> dict[int, dict[str, Any]]:
    """Return layer → its feed-forward part, and its attention if it is not that of the model."""
    layers: dict[int, dict[str, Any]] = {}
    for span in spans if isinstance(spans, list) else [None]:
        keys = ("first", "last", "ffn", "attention")
        first, last, ffn, attention = (span.get(key) if isinstance(span, dict) else None for key in keys)
        if type(first) is not int or type(last) is not int or not len(layers) == first <= last < _MAX_LAYERS:
            raise ValueError("its plan has invalid ranges of layers")
        parts = {"ffn": ffn} if attention is None else {"ffn": ffn, "attention": attention}
        layers |= {layer: parts for layer in range(first, last + 1)}
    return layers


def _changes(was: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, "path was → now") for each difference."""
    for path in dict.fromkeys((*was, *current)):
        if was.get(path) != current.get(path) and not _OF_MESSAGES.fullmatch(path):
            before, after = _printable_value(was.get(path)), _printable_value(current.get(path))
            yield path, f"{_printable_value(path)} {before} → {after}"


def _printable_value(value: Any) -> str:
    text = "none" if value is None else str(value)
    return printable(text if len(text) <= _MAX_WORD else text[:_MAX_WORD] + "…")


def _join_texts(texts: list[str]) -> str:
    num_more = len(texts) - MAX_SHOWN
    return ", ".join(texts[:MAX_SHOWN]) + (f" and {num_more} more" if num_more > 0 else "")
