"""Attention of a Hugging Face config: MLA, grouped queries, windows, and which layers have which."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from compiler.tools.importers import deepseek_v4
from compiler.tools.importers.families import ConfigFamily
from compiler.tools.importers.layers import linear_layers
from compiler.tools.importers.reader import ConfigReader, value_text
from compiler.tools.importers.rotation import FULL, SLIDING, rotations
from dsl.schema import Compressed, DeltaNet, Gqa, HeadDim, Indexer, Mla, Node, Rope

Attention = Mla | Gqa | Compressed | DeltaNet
INDEXED = "indexed_attention"  # layer type: attention to the tokens that an indexer chooses


def attentions(
    reader: ConfigReader, family: ConfigFamily, hidden: int, context: int, num_layers: int
) -> tuple[tuple[Attention, ...], int | None, Attention]:
    """The attention of each layer, the context length before its extension (None without one), and the attention of
    the multi-token prediction block."""
    if family.attention == "compressed":
        return deepseek_v4.attentions(reader, num_layers)
    kind: type[Node] = Mla if family.attention == "mla" else Gqa
    num_heads = reader.number("model.attention.heads", kind, "heads", "num_attention_heads")
    ropes: Mapping[str, Rope | None] = {FULL: None}
    original = None
    if family.rotates:
        ropes, original = rotations(reader, family, num_heads, hidden)
    else:
        reader.used |= {"rope_theta", "rope_scaling", "rope_parameters", "mla_use_nope"}
    attention: Mla | Gqa
    if family.attention == "mla":
        attention = _mla(reader, family, num_heads, ropes[FULL])
    else:
        attention = _gqa(reader, family, hidden, num_heads, ropes[FULL])
    linear, net = linear_layers(reader, family, num_layers)
    unrotated = _layers_without_rotation(reader, family, num_layers)
    kinds = [FULL] * num_layers if family.linear else _kinds(reader, family, num_layers, unrotated)
    window = _window(reader, family, context)

    def of_layer(layer: int) -> Attention:
        if net is not None and layer in linear:
            return net
        changes: dict[str, Any] = {"rope": None if layer in unrotated else ropes[kinds[layer]]}
        if window is not None:
            changes["window"] = window if kinds[layer] == SLIDING else None
        return attention.model_copy(update=changes)

    by_layer = tuple(map(of_layer, range(num_layers)))
    return by_layer, original, by_layer[-1]


def _mla(reader: ConfigReader, family: ConfigFamily, num_heads: int, rope: Rope | None) -> Mla:
    path = "model.attention"
    reader.used |= {"num_key_value_heads", "head_dim"}  # MLA has as many key heads as query heads
    return Mla(
        heads=num_heads,
        query_rank=reader.number(f"{path}.query_rank", Mla, "query_rank", "q_lora_rank", null=None),
        kv_rank=reader.number(f"{path}.kv_rank", Mla, "kv_rank", "kv_lora_rank"),
        head_dim=HeadDim(
            nope=reader.number(f"{path}.head_dim.nope", HeadDim, "nope", "qk_nope_head_dim"),
            rope=reader.number(f"{path}.head_dim.rope", HeadDim, "rope", "qk_rope_head_dim"),
            value=reader.number(f"{path}.head_dim.value", HeadDim, "value", "v_head_dim"),
        ),
        indexer=_indexer(reader) if family.indexes else None,
        rope=rope,
    )


def _indexer(reader: ConfigReader) -> Indexer:
    path, keys = (
        "model.attention.indexer",
        {"heads": "index_n_heads", "head_dim": "index_head_dim", "top_k": "index_topk"},
    )
    return Indexer(**{field: reader.number(f"{path}.{field}", Indexer, field, key) for field, key in keys.items()})


def _gqa(reader: ConfigReader, family: ConfigFamily, hidden: int, num_heads: int, rope: Rope | None) -> Gqa:
    path = "model.attention"
    width = reader.number(f"{path}.head_dim", Gqa, "head_dim", "head_dim", default=0)
    if not width:
        width = max(2, min(4096, hidden // num_heads))
        if width * num_heads != hidden and {"model.hidden", "model.attention.heads"} <= set(reader.origins):
            message = f"`hidden_size` = {hidden:,} does not divide into {num_heads:,} heads, and `head_dim` is missing"
            reader.complain("I0203", message, reader.origins.get("model.hidden"))
    kv_heads = num_heads
    if f"{path}.heads" in reader.origins:  # the default of kv_heads depends on a valid number of heads
        kv_heads = reader.number(f"{path}.kv_heads", Gqa, "kv_heads", "num_key_value_heads", null=num_heads)
    else:
        reader.used.add("num_key_value_heads")
    biased = family.always_biased or (family.bias != "" and reader.flag("attention_bias", False))
    return Gqa(
        heads=num_heads,
        kv_heads=kv_heads,
        head_dim=width,
        bias=(family.bias or None) if biased else None,
        qk_norm=_qk_norm(reader, family),
        scale=_scale(reader, family, width),
        softcap=_softcap(reader, family),
        sinks=family.sinks,
        output_gate=family.output_gate,
        rope=rope,
    )


def _qk_norm(reader: ConfigReader, family: ConfigFamily) -> Literal["head", "width"] | None:
    if family.may_norm:
        return "head" if reader.flag(family.may_norm, False) else None
    return family.qk_norm


def _scale(reader: ConfigReader, family: ConfigFamily, width: int) -> float | None:
    """The factor of q·k; None if it is the usual width**-0.5."""
    if not family.scale:
        return None
    value = float(reader.number("model.attention.scale", Scalar, "value", family.scale))
    scale = value**-0.5 if family.scale == "query_pre_attn_scalar" else value
    return None if math.isclose(scale, width**-0.5, rel_tol=1e-12) else scale


class Scalar(Node):
    """Bounds of the config's value for the scale of attention scores."""

    value: Annotated[float, Field(ge=1e-6, le=1e3)]  # the scale is this value, or value**-0.5


def _softcap(reader: ConfigReader, family: ConfigFamily) -> float | None:
    if not family.softcap:
        return None
    softcap: float | None = reader.number(
        "model.attention.softcap", Gqa, "softcap", "attn_logit_softcapping", default=None, null=None
    )
    return softcap


def _window(reader: ConfigReader, family: ConfigFamily, context: int) -> int | None:
    """The attention window in tokens; None if there is none, or it covers the whole context."""
    if not family.windows:
        return None
    window = reader.get("sliding_window")
    length = family.window if "sliding_window" not in reader.members else window.value if window is not None else None
    used = (not family.may_slide or reader.flag("use_sliding_window", False)) and length not in (None, False)
    if not used or (isinstance(length, int) and length >= context):
        return None
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        meaning = f"the window must be a number of tokens, not {value_text(length)}"
        reader.refuse("attention", "sliding_window", meaning)
        return None
    if window is not None:
        reader.origins["model.attention.window"] = window.span
    return length


def _layers_without_rotation(reader: ConfigReader, family: ConfigFamily, num_layers: int) -> set[int]:
    """Indices of layers whose queries and keys are not rotated."""
    if not family.skips_rotation:
        return set()
    interval = reader.count("no_rope_layer_interval", 1, 2**20, family.skips_rotation)
    listed = reader.get("no_rope_layers")
    if listed is None:
        return {*range(interval - 1, num_layers, interval)}
    flags = [entry.value for entry in listed.value] if isinstance(listed.value, tuple) else []
    if len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        text = f"`no_rope_layers` must have a 0 or a 1 for each of {num_layers} layers, unlike {value_text(listed)}"
        reader.complain("I0203", text, listed.span)
    return {layer for layer, flag in enumerate(flags[:num_layers]) if not flag}


def _kinds(reader: ConfigReader, family: ConfigFamily, num_layers: int, unrotated: set[int]) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer. `unrotated`: layers without RoPE."""
    if family.windows == "all":
        return [SLIDING] * num_layers
    listed = reader.get("layer_types")
    begin = reader.count("max_window_layers", 0, 2**40, 28) if family.slides_late or family.slides_early else 0
    interval = family.slides_every
    if family.local_theta:
        interval = reader.count("sliding_window_pattern", 1, 2**20, interval)
    if listed is None:
        if family.skips_rotation:
            return [SLIDING if layer in unrotated else FULL for layer in range(num_layers)]
        if interval:  # all but every N-th layer
            return [SLIDING if (layer + 1) % interval else FULL for layer in range(num_layers)]
        if family.slides_early:
            return [FULL if layer % 2 or layer >= begin else SLIDING for layer in range(num_layers)]
        return [SLIDING if layer >= begin else FULL for layer in range(num_layers)]
    values = [entry.value for entry in listed.value] if isinstance(listed.value, tuple) else [listed.value]
    values = [FULL if family.indexes and value == INDEXED else value for value in values]
    unsupported = next((value for value in values if value not in (SLIDING, FULL)), None)
    if unsupported is not None:
        reader.refuse(
            "attention",
            "layer_types",
            f"layers of {value_text(unsupported)}; a spec supports full and sliding attention",
        )
    elif len(values) != num_layers:
        reader.complain("I0203", f"`layer_types` has {len(values)} entries for {num_layers} layers", listed.span)
    else:
        return [str(value) for value in values]
    return [FULL] * num_layers
