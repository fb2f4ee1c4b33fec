"""Adapters of a checkpoint as PEFT reads them: lora_A and lora_B of each published matrix, and adapter_config.json.

The classes of `transformers` 5 hold the matrices of all routed experts of a layer in one parameter. PEFT has adapters
of such a parameter, too (`target_parameters`): the A of the experts one below the other, and of their B the columns in
turn. The parameters of a module nest in the order of its class, so the first one is inside: `base_layer`.
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
INSIDE, BEHIND = "base_model.model.", ".weight"  # PEFT's names of the model in it, and of what a module has
EXPERTS = "model.layers.{}.mlp.experts"  # the module of a layer's routed experts, in every class of `transformers`
PARAMETERS = {"up": "gate_up_proj", "down": "down_proj"}  # of it, in their order there
_EXPERT = re.compile(r"weight/layers\.(\d+)\.ffn\.experts\.(\d+)\.(up|down)")
_LIKE_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")
_CALLED_OTHERWISE = re.compile(r"\.(attn|ffn|f_[ab]_proj|linear_attn)\.")  # by the class than in the published files

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors of a checkpoint


@dataclass(frozen=True)
class Adapters:
    """The tensors of PEFT's file, and the modules and parameters that they adapt."""

    tensors: tuple[PublishedTensor, ...]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    rank: int


def published_adapters(manifest: Manifest, tensors: Iterable[PublishedTensor], family: PublishedFamily) -> Adapters:
    """The adapters of a checkpoint; `tensors`: those of the published model. Matrices that are one here share their A.

    Raises ModelError where there are no adapters, or some that PEFT has no module for.
    """
    held = {entry.name: entry.shape for shard in manifest.shards for entry in shard.entries}
    given = [each for each in tensors if each.pieces]
    found = [each for each in given if f"{each.pieces[0].tensor}{A}" in held]
    has_experts = not family.remote and any(_EXPERT.match(each.pieces[0].tensor) for each in given)
    if not found:
        raise ModelError("it has no adapters: leave --adapter out")
    fused = [] if family.remote else [each for each in found if _EXPERT.match(each.pieces[0].tensor)]
    plain = [each for each in found if each not in fused]
    for each in plain:
        if each.pieces[0].tensor.startswith("weight/mtp."):
            raise ModelError(f"{each.name} has an adapter, and `transformers` has no such module: leave --adapter out")
        if _CALLED_OTHERWISE.search(each.name):
            text = f"{each.name} has an adapter, and {family.architecture} has no module of this name for PEFT"
            raise ModelError(f"{text}: leave --adapter out")
        if len(each.pieces) != 1:
            text = f"{each.name} is made of several matrices with adapters of their own, and PEFT has one for it"
            raise ModelError(f"{text}: leave --adapter out")
    modules = tuple(each.name.removesuffix(BEHIND).replace(".block_sparse_moe.", ".mlp.") for each in plain)
    pairs = [pair for name, each in zip(modules, plain, strict=True) for pair in _pair(name, each.pieces[0], held)]
    experts, parameters = _of_experts(fused, held)
    if has_experts:  # PEFT takes modules of these names for those of experts, wherever they are
        parameters = (*(f"{each}{BEHIND}" for each in modules if each.endswith(_LIKE_EXPERTS)), *parameters)
        modules = tuple(each for each in modules if not each.endswith(_LIKE_EXPERTS))
    rank = held[f"{found[0].pieces[0].tensor}{A}"][0]
    return Adapters((*pairs, *experts), modules, parameters, rank)


def adapter_config(manifest: Manifest, adapters: Adapters, base: str | None) -> dict[str, Any]:
    """PEFT's configuration; `base`: what `from_pretrained` loads the weights beside the adapters by."""
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


def _pair(module: str, piece: RowPiece, held: Shapes) -> Iterator[PublishedTensor]:
    """A and B of the rows of a matrix."""
    rank, columns = held[f"{piece.tensor}{A}"]
    of_a, of_b = RowPiece(f"{piece.tensor}{A}", 0, rank), replace(piece, tensor=f"{piece.tensor}{B}")
    yield PublishedTensor(f"{INSIDE}{module}.lora_A{BEHIND}", (rank, columns), "plain", (of_a,))
    yield PublishedTensor(f"{INSIDE}{module}.lora_B{BEHIND}", (piece.end - piece.start, rank), "plain", (of_b,))


def _of_experts(matrices: Iterable[PublishedTensor], held: Shapes) -> tuple[list[PublishedTensor], tuple[str, ...]]:
    """A and B of the parameters that hold the matrices of all experts of a layer, and the names of these."""
    of: dict[tuple[int, str], dict[int, bool]] = {}  # of a layer's matrices: each expert, and whether rows lie in turn
    for piece in (piece for each in matrices for piece in each.pieces):
        match = _EXPERT.match(piece.tensor)
        assert match is not None, "filtered before"
        of.setdefault((int(match[1]), match[3]), {})[int(match[2])] = piece.in_turn
    tensors, names = list[PublishedTensor](), list[str]()
    for layer, which in sorted(of, key=lambda key: (key[0], [*PARAMETERS].index(key[1]))):
        module, experts = EXPERTS.format(layer), sorted(of[layer, which])
        stored = [f"weight/layers.{layer}.ffn.experts.{expert}.{which}" for expert in experts]
        is_inside = which == "up" and (layer, "down") in of
        in_turn = of[layer, which][experts[0]]
        names.append(f"{module}.{PARAMETERS[which]}")
        tensors += _fused(f"{INSIDE}{module}{'.base_layer' if is_inside else ''}", stored, held, in_turn)
    return tensors, tuple(names)


def _fused(module: str, stored: Sequence[str], held: Shapes, in_turn: bool) -> Iterator[PublishedTensor]:
    rank, columns = held[f"{stored[0]}{A}"]
    rows = held[f"{stored[0]}{B}"][0]
    of_a = tuple(RowPiece(f"{name}{A}", 0, rank) for name in stored)
    of_b = tuple(RowPiece(f"{name}{B}", 0, rows, in_turn=in_turn) for name in stored)
    yield PublishedTensor(f"{module}.lora_A{BEHIND}", (len(stored) * rank, columns), "plain", of_a)
    yield PublishedTensor(f"{module}.lora_B{BEHIND}", (rows, rank * len(stored)), "spread", of_b)
