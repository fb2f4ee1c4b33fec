"""Layers of linear attention in a Hugging Face config: which they are, and their sizes."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.tools.importers.families import Family
from compiler.tools.importers.json_text import Json
from compiler.tools.importers.reader import Reader, shown
from compiler.tools.importers.rotation import FULL
from dsl.schema import DeltaNet

LINEAR = "linear_attention"  # a kind of layers
AT = "model.attention"


def linear_layers(reader: Reader, family: Family, num_layers: int) -> tuple[set[int], DeltaNet | None]:
    """The layers that have linear attention, and what it is in them."""
    if not family.linear:
        return set(), None
    nested = reader.part("linear_attn_config") if family.linear == "kimi" else {}
    found = _listed(reader, num_layers)
    if nested and found is None:
        found = _counted(reader, nested, num_layers)
    if found is None and family.linear == "qwen":
        every = reader.count("full_attention_interval", 1, 2**20, 4)
        found = {layer for layer in range(num_layers) if (layer + 1) % every}
    elif found is None:
        found = {layer for layer in range(num_layers) if not layer or layer % 4}
    reader.used |= {"full_attention_interval"}
    return found, _kimi(reader, nested) if family.linear == "kimi" else _qwen(reader)


def _listed(reader: Reader, num_layers: int) -> set[int] | None:
    """The layers that `layer_types` says; None where it is absent."""
    listed = reader.get("layer_types")
    if listed is None:
        return None
    values = [each.value for each in listed.value] if isinstance(listed.value, tuple) else []
    if len(values) != num_layers or any(each not in (FULL, LINEAR) for each in values):
        text = f"`layer_types` has {FULL} or {LINEAR} for each of {num_layers} layers, {shown(listed)} has not"
        reader.complain("I0203", text, listed.span)
    return {layer for layer, kind in enumerate(values[:num_layers]) if kind == LINEAR}


def _counted(reader: Reader, nested: Mapping[str, Json], num_layers: int) -> set[int] | None:
    """The layers that Kimi's own configuration counts from 1."""
    listed = nested.get("kda_layers")
    if listed is None or not isinstance(listed.value, tuple):
        return None
    found = {each.value - 1 for each in listed.value if type(each.value) is int}
    if len(found) != len(listed.value) or not found <= {*range(num_layers)}:
        text = f"`kda_layers` has numbers of layers, 1 to {num_layers}, {shown(listed)} has others"
        reader.complain("I0203", text, listed.span)
    return found & {*range(num_layers)}


def _qwen(reader: Reader) -> DeltaNet:
    names = {
        "heads": "linear_num_value_heads",
        "key_heads": "linear_num_key_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
        "convolution": "linear_conv_kernel_dim",
    }
    sizes = {key: reader.number(f"{AT}.{key}", DeltaNet, key, name) for key, name in names.items()}
    return DeltaNet(gate="head", **sizes)


def _kimi(reader: Reader, nested: Mapping[str, Json]) -> DeltaNet:
    """Its sizes are in an object of their own as it was published; `transformers` writes them beside all others."""
    names = {"heads": "num_heads", "key_dim": "head_dim", "convolution": "short_conv_kernel_size"}
    plain = {"heads": "linear_num_heads", "key_dim": "linear_head_dim", "convolution": "linear_conv_kernel_dim"}
    inner = Reader(Json(nested, reader.members["linear_attn_config"].span), lossy=reader.lossy) if nested else reader
    sizes = {
        key: inner.number(f"{AT}.{key}", DeltaNet, key, name) for key, name in (names if nested else plain).items()
    }
    if nested:
        reader.used |= {*plain.values()}
        reader.mistakes += inner.mistakes
        reader.origins |= {path: span for path, span in inner.origins.items() if path}
    return DeltaNet(gate="channel", key_heads=sizes["heads"], value_dim=sizes["key_dim"], **sizes)
