"""Exports the adapters of a checkpoint for PEFT: lora_A and lora_B of each published matrix, and adapter_config.json.

The classes of `transformers` 5 hold the matrices of all routed experts of a layer in one parameter. PEFT can adapt such
a parameter (`target_parameters`): the experts' A matrices are stacked by rows, and the columns of their B matrices are
interleaved. Wrappers of a module's parameters nest in the order of its class, so the first is inside: `base_layer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compiler.tools.weights.checkpoint import ModelError
from compiler.tools.weights.families import PublishedFamily
from runtime.checkpoint.shard_manifest import Manifest
from runtime.contract.weights import A, B, PublishedTensor, RowPiece, factor_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INSIDE, BEHIND = "base_model.model.", ".weight"  # PEFT's prefix of the wrapped model, and the suffix of a matrix
EXPERTS = "model.layers.{}.mlp.experts"  # the module of a layer's routed experts, in every class of `transformers`
PARAMETERS = {"up": "gate_up_proj", "down": "down_proj"}  # parameters of that module, in its order
_EXPERT = re.compile(r"weight/layers\.(\d+)\.ffn\.experts\.(\d+)\.(up|down)")
_LIKE_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")
_CALLED_OTHERWISE = re.compile(
    r"\.(attn|ffn|f_[ab]_proj|linear_attn)\."
)  # names that differ in the class and the files

Shapes = Mapping[str, tuple[int, ...]]  # tensor of a checkpoint → shape


@dataclass(frozen=True)
class Adapters:
    """The tensors of a PEFT file, and the modules and parameters that they adapt."""

    tensors: tuple[PublishedTensor, ...]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    rank: int


def published_adapters(manifest: Manifest, tensors: Iterable[PublishedTensor], family: PublishedFamily) -> Adapters:
    """The adapters of a checkpoint. `tensors`: those of the published model. Published matrices that are parts of one
    matrix of the checkpoint share its A.

    Raises ModelError if there are no adapters, or PEFT has no module for one.
    """
    shapes = {entry.name: entry.shape for shard in manifest.shards for entry in shard.entries}
    candidates = [tensor for tensor in tensors if tensor.pieces]
    adapted = [tensor for tensor in candidates if f"{tensor.pieces[0].tensor}{A}" in shapes]
    has_experts = not family.remote and any(_EXPERT.match(tensor.pieces[0].tensor) for tensor in candidates)
    if not adapted:
        raise ModelError("it has no adapters: leave --adapter out")
    fused = [] if family.remote else [tensor for tensor in adapted if _EXPERT.match(tensor.pieces[0].tensor)]
    plain = [tensor for tensor in adapted if tensor not in fused]
    for tensor in plain:
        if tensor.pieces[0].tensor.startswith("weight/mtp."):
            raise ModelError(
                f"{tensor.name} has an adapter, and `transformers` has no such module: leave --adapter out"
            )
        if _CALLED_OTHERWISE.search(tensor.name):
            text = f"{tensor.name} has an adapter, and {family.architecture} has no module of this name for PEFT"
            raise ModelError(f"{text}: leave --adapter out")
        if len(tensor.pieces) != 1:
            text = f"{tensor.name} consists of several matrices with separate adapters, and PEFT allows only one"
            raise ModelError(f"{text}: leave --adapter out")
    modules = tuple(tensor.name.removesuffix(BEHIND).replace(".block_sparse_moe.", ".mlp.") for tensor in plain)
    pairs = [
        pair for name, tensor in zip(modules, plain, strict=True) for pair in _pair(name, tensor.pieces[0], shapes)
    ]
    experts, parameters = _expert_adapters(fused, shapes)
    if has_experts:  # PEFT treats modules with these names as experts, wherever they are
        parameters = (*(f"{module}{BEHIND}" for module in modules if module.endswith(_LIKE_EXPERTS)), *parameters)
        modules = tuple(module for module in modules if not module.endswith(_LIKE_EXPERTS))
    rank = shapes[f"{adapted[0].pieces[0].tensor}{A}"][0]
    return Adapters((*pairs, *experts), modules, parameters, rank)


def adapter_config(manifest: Manifest, adapters: Adapters, base: str | None) -> dict[str, Any]:
    """PEFT's configuration. `base`: the name by which `from_pretrained` loads the base weights."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": factor_of(manifest.meta) * adapters.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": list(adapters.modules) or None,
        **({"target_parameters": list(adapters.parameters)} if adapters.parameters else {}),
    }


def _pair(module: str, piece: RowPiece, shapes: Shapes) -> Iterator[PublishedTensor]:
    """A and B for the rows of a matrix."""
    rank, columns = shapes[f"{piece.tensor}{A}"]
    a, b = RowPiece(f"{piece.tensor}{A}", 0, rank), replace(piece, tensor=f"{piece.tensor}{B}")
    yield PublishedTensor(f"{INSIDE}{module}.lora_A{BEHIND}", (rank, columns), "plain", (a,))
    yield PublishedTensor(f"{INSIDE}{module}.lora_B{BEHIND}", (piece.end - piece.start, rank), "plain", (b,))


def _expert_adapters(
    matrices: Iterable[PublishedTensor], shapes: Shapes
) -> tuple[list[PublishedTensor], tuple[str, ...]]:
    """A and B for the parameters that hold all experts of a layer, and the names of these parameters."""
    in_turn_of: dict[tuple[int, str], dict[int, bool]] = {}  # (layer, matrix) → expert → whether rows are interleaved
    for piece in (piece for tensor in matrices for piece in tensor.pieces):
        match = _EXPERT.match(piece.tensor)
        assert match is not None, "filtered before"
        in_turn_of.setdefault((int(match[1]), match[3]), {})[int(match[2])] = piece.in_turn
    tensors, names = list[PublishedTensor](), list[str]()
    for layer, matrix in sorted(in_turn_of, key=lambda key: (key[0], [*PARAMETERS].index(key[1]))):
        module, experts = EXPERTS.format(layer), sorted(in_turn_of[layer, matrix])
        stored = [f"weight/layers.{layer}.ffn.experts.{expert}.{matrix}" for expert in experts]
        is_inside = matrix == "up" and (layer, "down") in in_turn_of
        in_turn = in_turn_of[layer, matrix][experts[0]]
        names.append(f"{module}.{PARAMETERS[matrix]}")
        tensors += _fused_matrices(f"{INSIDE}{module}{'.base_layer' if is_inside else ''}", stored, shapes, in_turn)
    return tensors, tuple(names)


def _fused_matrices(module: str, stored: Sequence[str], shapes: Shapes, in_turn: bool) -> Iterator[PublishedTensor]:
    rank, columns = shapes[f"{stored[0]}{A}"]
    rows = shapes[f"{stored[0]}{B}"][0]
    a = tuple(RowPiece(f"{name}{A}", 0, rank) for name in stored)
    b = tuple(RowPiece(f"{name}{B}", 0, rows, in_turn=in_turn) for name in stored)
    yield PublishedTensor(f"{module}.lora_A{BEHIND}", (len(stored) * rank, columns), "plain", a)
    yield PublishedTensor(f"{module}.lora_B{BEHIND}", (rows, rank * len(stored)), "spread", b)
