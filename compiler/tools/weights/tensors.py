"""The tensors of a published model as pieces of a checkpoint's tensors: one list for import and export.

The layers declare a checkpoint's tensors (compiler/plan/parameters.py); tables map them to published names. A tensor
without a name is an error, so none is forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import gcd

from compiler.plan.parameters import LogicalParameter, model_parameters, num_experts, stored_name
from compiler.tools.weights.families import PublishedFamily
from dsl.schema import Compressed, DeltaNet, Gqa, Mla, Model, Moe
from runtime.contract.weights import Halves, PublishedTensor, RowPiece

# Path of a tensor in a block → published names; * is an expert's index. Several names divide its rows among them.
NAMES: Mapping[str, tuple[str, ...]] = {
    "attention.norm": ("input_layernorm.weight",),
    "attention.qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attention.out_bias": ("self_attn.o_proj.bias",),
    "attention.sinks": ("self_attn.sinks",),
    "attention.q": ("self_attn.q_proj.weight",),
    "attention.q_down": ("self_attn.q_a_proj.weight",),
    "attention.q_up": ("self_attn.q_b_proj.weight",),
    "attention.kv_down": ("self_attn.kv_a_proj_with_mqa.weight",),
    "attention.kv_norm": ("self_attn.kv_a_layernorm.weight",),
    "attention.kv_up": ("self_attn.kv_b_proj.weight",),
    "attention.q_norm": ("self_attn.q_norm.weight",),
    "attention.k_norm": ("self_attn.k_norm.weight",),
    "attention.out": ("self_attn.o_proj.weight",),
    "attention.indexer.q": ("self_attn.indexer.wq_b.weight",),
    "attention.indexer.k": ("self_attn.indexer.wk.weight",),
    "attention.indexer.k_norm": ("self_attn.indexer.k_norm.weight",),
    "attention.indexer.k_bias": ("self_attn.indexer.k_norm.bias",),
    "attention.indexer.weights": ("self_attn.indexer.weights_proj.weight",),
    "ffn.norm": ("post_attention_layernorm.weight",),
    "ffn.up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn.up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "ffn.down": ("mlp.down_proj.weight",),
    "ffn.down_bias": ("mlp.down_proj.bias",),
    "ffn.router.weight": ("mlp.gate.weight",),
    "ffn.router.bias": ("mlp.gate.e_score_correction_bias",),
    "ffn.shared.up": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "ffn.shared.down": ("mlp.shared_experts.down_proj.weight",),
    "ffn.experts.*.up": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    "ffn.experts.*.down": ("mlp.experts.*.down_proj.weight",),
    "embedding_norm": ("enorm.weight",),
    "hidden_norm": ("hnorm.weight",),
    "projection": ("eh_proj.weight",),
    "final_norm": ("shared_head.norm.weight",),
}
OF_LATENT = {"attention.q_norm": ("self_attn.q_a_layernorm.weight",)}  # with MLA; otherwise a norm of query heads
ENDS = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
SHARED = {"embedding": "embed_tokens.weight", "head": "shared_head.head.weight"}  # an MTP block has copies of them
# Published shapes of tensors that are not matrices: taps have an extra dimension of size 1, Kimi's decay rates three.
PUBLISHED_IN: Mapping[str, Callable[..., tuple[int, ...]]] = {
    "attention.convolution": lambda name, rows, taps: (rows, 1, taps),
    "attention.decay_rate": lambda name, heads: (1, 1, heads, 1) if name.startswith("self_attn.") else (heads,),
}
OF_UP = ("ffn.experts.*.up", "ffn.experts.*.up_bias")
INDEXED = ("q", "k", "k_norm", "k_bias")  # indexer tensors with rotated rows, in halves in every family
PLAIN = frozenset(
    {"ffn.router.weight", "projection", "attention.indexer.weights"}
)  # matrices that no model stores in FP8 blocks
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # computed from the config


Attention = Mla | Gqa | Compressed | DeltaNet


class UnnamedError(ValueError):
    """The family has no names for some tensors of the model. The message lists them."""


def publish_tensors(model: Model, family: PublishedFamily, rotates: str = "") -> tuple[PublishedTensor, ...]:
    """The tensors of a model as its family publishes them, in the order of the model.

    `rotates`: overrides the family's order of rotated columns. Raises UnnamedError.
    """
    parameters = model_parameters(model)
    naming = _Naming(model, family, (rotates or family.rotates) == "halves")
    if unnamed := [parameter.name for parameter in parameters if not naming.knows(parameter)]:
        raise UnnamedError(", ".join(unnamed[:6]) + (f" and {len(unnamed) - 6} more" if len(unnamed) > 6 else ""))
    tensors: dict[str, PublishedTensor] = {}
    for tensor in (tensor for parameter in parameters for tensor in naming.tensors_of(parameter)):
        before = tensors.get(tensor.name)
        tensors[tensor.name] = (
            tensor if before is None else (_append_expert if tensor.stacked else _interleave_by_head)(before, tensor)
        )
    return (*tensors.values(), *_additional_tensors(model, family, parameters))


def _append_expert(before: PublishedTensor, expert: PublishedTensor) -> PublishedTensor:
    """A published tensor of stacked experts, extended by one expert."""
    return replace(before, shape=(before.shape[0] + 1, *before.shape[1:]), pieces=(*before.pieces, *expert.pieces))


def _interleave_by_head(before: PublishedTensor, after: PublishedTensor) -> PublishedTensor:
    """A published tensor with the rows of both, interleaved by key head."""
    heads = gcd(len(before.pieces), len(after.pieces))
    by_head = [
        tensor.pieces[len(tensor.pieces) * head // heads : len(tensor.pieces) * (head + 1) // heads]
        for head in range(heads)
        for tensor in (before, after)
    ]
    rows = before.shape[0] + after.shape[0]
    return replace(before, shape=(rows, *before.shape[1:]), pieces=tuple(chain.from_iterable(by_head)))


class _Naming:
    """Maps a checkpoint's tensors to published tensors."""

    def __init__(self, model: Model, family: PublishedFamily, halves: bool) -> None:
        self._model, self._halves = model, halves
        self._names, self._linear = {**NAMES, **family.names}, family.linear
        self._ends = {**ENDS, **family.ends}
        self._from_one = family.gains_from_one

    def knows(self, parameter: LogicalParameter) -> bool:
        """Whether a tensor has a name."""
        local = _local(parameter.name)
        return parameter.name in self._ends or local in self._names or local in self._linear

    def tensors_of(self, parameter: LogicalParameter) -> Iterator[PublishedTensor]:
        """The published tensors that hold the rows of a parameter."""
        if parameter.name in self._ends:
            end_tensor = _published_tensor(self._ends[parameter.name], "plain", parameter, 0, parameter.shape[0])
            yield replace(end_tensor, from_one=self._is_from_one(parameter))
            return
        local, block = _local(parameter.name), _published_block(self._model, parameter.name)
        attention = _attention_of(self._model, parameter.name)
        overrides = OF_LATENT if isinstance(attention, Mla) else self._linear if isinstance(attention, DeltaNet) else {}
        names = overrides.get(local) or self._names[local]
        sizes = _sizes(local, attention, parameter, len(names))
        kind = {"bias": "buffer", "table": "table"}.get(parameter.role, "linear")
        if len(parameter.shape) == 1 or local in PLAIN:
            kind = "plain" if kind == "linear" else kind
        start = 0
        for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
            full = f"{block}.{name}".replace("*", str(parameter.expert))
            halves = (
                _rotated_rows(local, attention, index) if self._halves else _rotated_rows_of_indexer(local, attention)
            )
            tensor = _published_tensor(full, kind, parameter, start, start + size, halves)
            tensor = _reorder_by_head(
                tensor, local, index, attention, parameter, tuple(self._linear.values()).count(names)
            )
            if local in PUBLISHED_IN:
                tensor = replace(
                    tensor, kind="plain", shape=PUBLISHED_IN[local](name, *tensor.shape), rows=tensor.shape
                )
            if "*" in local and "*" not in name:  # all experts in one tensor, with interleaved gate and up columns
                piece = replace(tensor.pieces[0], in_turn=local in OF_UP)
                tensor = replace(
                    tensor, shape=(1, *reversed(tensor.shape)), kind="plain", pieces=(piece,), stacked=True
                )
            below = num_experts(self._model, parameter.name) if kind == "table" else 0
            yield replace(tensor, from_one=self._is_from_one(parameter), below=below)
            start += size

    def _is_from_one(self, parameter: LogicalParameter) -> bool:
        """Whether a tensor is published as its differences from 1."""
        return self._from_one and parameter.init is None and _local(parameter.name) != "attention.out_norm"


def _reorder_by_head(
    tensor: PublishedTensor, local: str, index: int, attention: Attention, parameter: LogicalParameter, together: int
) -> PublishedTensor:
    """Reorder the rows of a tensor that is published head by head: queries with their gates, or linear-attention
    tensors of which `together` share one published tensor."""
    (piece,) = tensor.pieces
    if isinstance(attention, Gqa) and attention.output_gate and local in ("attention.qkv", "attention.qkv_bias"):
        if index:
            return tensor
        width, gates = attention.head_dim, parameter.shape[0] - attention.heads * attention.head_dim
        starts = [(head * width, gates + head * width) for head in range(attention.heads)]
        pieces = [
            replace(piece, start=start, end=start + width, halves=piece.halves if start < gates else None)
            for start in chain.from_iterable(starts)
        ]
        rows = 2 * attention.heads * width
    elif isinstance(attention, DeltaNet) and together > 1:
        heads = attention.key_heads
        parts = _widths(attention) if local == "attention.qkv" else (parameter.shape[0],)
        firsts = [sum(parts[:part]) for part in range(len(parts))]
        pieces = [
            replace(piece, start=first + head * part // heads, end=first + (head + 1) * part // heads)
            for head in range(heads)
            for first, part in zip(firsts, parts, strict=True)
        ]
        rows = sum(parts)
    else:
        return tensor
    return replace(tensor, shape=(rows, *tensor.shape[1:]), pieces=tuple(pieces))


def _widths(net: DeltaNet) -> tuple[int, ...]:
    """Rows of queries, keys and values."""
    keys = net.key_heads * net.key_dim
    return keys, keys, net.heads * net.value_dim


def _attention_of(model: Model, name: str) -> Attention:
    """The attention of the block of a tensor."""
    kind, index = name.split(".")[:2]
    attention = model.attention_of(int(index)) if kind == "layers" else model.attention_of_mtp
    assert isinstance(attention, Mla | Gqa | Compressed | DeltaNet), (
        "compiler/tools/weights/checkpoint.py refuses others"
    )
    return attention


def _sizes(local: str, attention: Attention, parameter: LogicalParameter, count: int) -> Sequence[int]:
    """The number of rows of each part of a tensor."""
    if local in ("attention.qkv", "attention.qkv_bias"):
        if isinstance(attention, DeltaNet):
            return _widths(attention) if count > 1 else (parameter.shape[0],)
        assert isinstance(attention, Gqa)
        keys = attention.kv_heads * attention.head_dim
        return attention.heads * attention.head_dim, keys, keys
    if isinstance(attention, DeltaNet) and local == "attention.convolution" and count > 1:
        return _widths(attention)
    return (parameter.shape[0] // count,) * count


def _rotated_rows(local: str, attention: Attention, index: int) -> Halves | None:
    """The rotated rows of part `index` of a tensor; None if no row is rotated."""
    if isinstance(attention, DeltaNet) or attention.rope is None:
        return None
    assert not isinstance(attention, Compressed), "published with adjacent pairs"
    if isinstance(attention, Mla):
        nope, rope = attention.head_dim.nope, attention.head_dim.rope
        if local in ("attention.q", "attention.q_up"):
            return Halves(nope + rope, nope, rope)
        if local == "attention.kv_down":
            return Halves(attention.kv_rank + rope, attention.kv_rank, rope)
        return _rotated_rows_of_indexer(local, attention)
    norm, part = ("attention.q_norm", "attention.k_norm"), ("attention.qkv", "attention.qkv_bias")
    if local in norm or (local in part and index < 2):
        return Halves(attention.head_dim, 0, attention.rope.width or attention.head_dim)
    return None


def _rotated_rows_of_indexer(local: str, attention: Attention) -> Halves | None:
    """The rotated rows of an indexer tensor: the first of each head."""
    if not isinstance(attention, Mla) or attention.indexer is None or attention.rope is None:
        return None
    if local not in {f"attention.indexer.{name}" for name in INDEXED}:
        return None
    return Halves(attention.indexer.head_dim, 0, attention.head_dim.rope)


def _additional_tensors(
    model: Model, family: PublishedFamily, parameters: Sequence[LogicalParameter]
) -> Iterator[PublishedTensor]:
    """Published tensors without a counterpart in the checkpoint: copies for MTP, absent biases and empty experts."""
    by_name = {parameter.name: parameter for parameter in parameters}
    for k in range(model.mtp.depth if model.mtp else 0):
        for name, theirs in SHARED.items():
            original = by_name.get(name, by_name["embedding"])  # a tied head
            full = f"{_published_block(model, f'mtp.{k}.')}.{theirs}"
            yield _published_tensor(full, "plain", original, 0, original.shape[0], optional=True)
    if family.fixed.get("score") is None:
        return
    for parameter in parameters:
        if _local(parameter.name) != "ffn.router.weight":
            continue
        block, prefix = _published_block(model, parameter.name), parameter.name.removesuffix("ffn.router.weight")
        experts, D = parameter.shape
        if family.fixed["score"] == "sigmoid" and f"{prefix}ffn.router.bias" not in by_name:
            yield PublishedTensor(f"{block}.mlp.gate.e_score_correction_bias", (experts,), "buffer", (), optional=True)
        if f"{prefix}ffn.shared.up" not in by_name:
            for local in ("ffn.shared.up", "ffn.shared.down"):
                for name in NAMES[local]:
                    shape = (D, 0) if local.endswith("down") else (0, D)
                    yield PublishedTensor(f"{block}.{name}", shape, "plain", (), optional=True)


def _published_tensor(
    name: str,
    kind: str,
    parameter: LogicalParameter,
    start: int,
    end: int,
    halves: Halves | None = None,
    optional: bool = False,
) -> PublishedTensor:
    piece = RowPiece(stored_name(parameter), start, end, halves)
    shape = (end - start, *parameter.shape[1:])
    return PublishedTensor(name, shape, kind, (piece,), optional)  # type: ignore[arg-type]


def _local(name: str) -> str:
    """The path of a tensor in its block: ffn.experts.*.up for layers.3.ffn.experts.17.up."""
    parts = name.split(".")
    inside = parts[2:] if parts[0] in ("layers", "mtp") else parts
    return ".".join("*" if part.isdigit() else part for part in inside)


def _published_block(model: Model, name: str) -> str:
    """model.layers.3 for layers.3.…; the MTP blocks follow the layers."""
    kind, index = name.split(".")[:2]
    return f"model.layers.{int(index) + (model.num_layers if kind == 'mtp' else 0)}"


def copies_of(model: Model) -> tuple[PublishedTensor, ...]:
    """Tensors that a published model may have although they repeat another: the head of tied embeddings."""
    if not model.tied:
        return ()
    embedding = next(parameter for parameter in model_parameters(model) if parameter.name == "embedding")
    return (_published_tensor(ENDS["head"], "plain", embedding, 0, embedding.shape[0], optional=True),)


def mtp_block(model: Model, index: int) -> str:
    """The prefix of tensor names in a published MTP block."""
    return f"model.layers.{model.num_layers + index}."


def experts_of(model: Model) -> list[Moe]:
    """The MoE layers of a model, one for each range of layers."""
    return [span.ffn for span in model.layers if isinstance(span.ffn, Moe)]
