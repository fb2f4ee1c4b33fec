"""Adapters of a checkpoint as PEFT reads them: lora_A and lora_B of each published matrix, and adapter_config.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from compiler.weights.checkpoint import ModelError
from runtime.adapter_names import A, B
from runtime.checkpoint.shard_manifest import Manifest
from runtime.contract.weights import Piece, Published, factor_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INSIDE, BEHIND = "base_model.model.", ".weight"  # PEFT's names of the model in it, and of what a module has


def published_adapters(manifest: Manifest, tensors: Iterable[Published]) -> tuple[Published, ...]:
    """The tensors of PEFT's file; `tensors`: those of the published model. Matrices that are one here share their A.

    Raises ModelError where there are no adapters, or some that PEFT has no module for.
    """
    held = {entry.name: entry.shape for shard in manifest.shards for entry in shard.entries}
    found = [each for each in tensors if each.pieces and f"{each.pieces[0].tensor}{A}" in held]
    if not found:
        raise ModelError("it has no adapters: leave --adapter out")
    for each in found:
        if ".experts." in each.name or each.pieces[0].tensor.startswith("weight/mtp."):
            raise ModelError(f"{each.name} has an adapter, and no module of its own in PEFT: leave --adapter out")
    return tuple(pair for each in found for pair in _pair(each, held[f"{each.pieces[0].tensor}{A}"]))


def adapter_config(manifest: Manifest, tensors: Iterable[Published], base: str | None) -> dict[str, Any]:
    """PEFT's configuration; `tensors`: those of its file; `base`: what `from_pretrained` loads the weights by."""
    rows = [each for each in tensors if each.name.endswith(f".lora_A{BEHIND}")]
    rank = rows[0].shape[0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": factor_of(manifest.meta) * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [each.name.removeprefix(INSIDE).removesuffix(f".lora_A{BEHIND}") for each in rows],
    }


def _pair(matrix: Published, extents: tuple[int, ...]) -> Iterator[Published]:
    (piece,), (rank, columns) = matrix.pieces, extents
    module = f"{INSIDE}{matrix.name.removesuffix(BEHIND)}"
    of_a, of_b = Piece(f"{piece.tensor}{A}", 0, rank), Piece(f"{piece.tensor}{B}", piece.start, piece.end, piece.halves)
    yield Published(f"{module}.lora_A{BEHIND}", (rank, columns), "plain", (of_a,))
    yield Published(f"{module}.lora_B{BEHIND}", (piece.end - piece.start, rank), "plain", (of_b,))
