"""RoPE settings of a Hugging Face config: theta, rotated width, context extension, and differences by layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compiler.tools.importers.families import ConfigFamily
from compiler.tools.importers.json_text import JsonValue, parse
from compiler.tools.importers.reader import REFUSED, ConfigReader, Remark, value_text
from dsl.messages.diagnostics import Source
from dsl.schema import LinearScaling, Llama3Scaling, Node, Rope, YarnScaling

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers
THETA = "model.attention.rope.theta"
WIDTHS = range(2, 4097)  # of `Rope.width`


def rotations(
    reader: ConfigReader, family: ConfigFamily, num_heads: int, hidden: int
) -> tuple[Mapping[str, Rope], int | None]:
    """RoPE by kind of layer, and the context length before its extension (None without an extension)."""
    parameters = reader.part("rope_parameters")
    if any(isinstance(value.value, Mapping) for value in parameters.values()):
        if family.local_theta:
            return _ropes_by_layer_kind(reader, family, parameters)
        reader.refuse("rope", "rope_parameters", "different RoPE settings for each kind of layer; write them by hand")
        rope, original = Rope(theta=1.0), None
    else:
        rope, original = _rope(reader, family, parameters, num_heads, hidden)
    local = rope
    if family.local_theta:
        local = Rope(theta=reader.number("", Rope, "theta", "rope_local_base_freq"))
    return {FULL: rope, SLIDING: local}, original


def _ropes_by_layer_kind(
    reader: ConfigReader, family: ConfigFamily, parameters: Mapping[str, JsonValue]
) -> tuple[Mapping[str, Rope], int | None]:
    """RoPE by kind of layer, where `rope_parameters` has one entry for each kind."""
    ropes: dict[str, Rope] = {}
    before: int | None = None
    bases = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
    reader.used |= {*bases.values(), "rope_scaling"}
    for key in sorted({*parameters} - {*bases}):
        text = f"`{value_text(key)[1:-1]}` of rope_parameters is unknown, and left out of this spec"
        reader.warn("I0302", "rope", text, parameters[key].key)
    for kind, base in bases.items():
        part = parameters[kind].value if kind in parameters else {}
        part = part if isinstance(part, Mapping) else {}
        inner = ConfigReader(JsonValue(part, reader.members["rope_parameters"].span), lossy=reader.lossy)
        theta = inner.number(THETA, Rope, "theta", "rope_theta", default=family.defaults[base])
        reader.mistakes += inner.mistakes
        scaling, original = scaling_of(reader, "rope_parameters", part) if part else (None, None)
        ropes[kind] = Rope(theta=theta, scaling=scaling)
        before = original if original is not None else before
    return ropes, before


def _rope(
    reader: ConfigReader, family: ConfigFamily, parameters: Mapping[str, JsonValue], num_heads: int, hidden: int
) -> tuple[Rope, int | None]:
    """RoPE for all layers, and the context length before its extension (None without an extension)."""
    scaling = reader.part("rope_scaling")
    inner = (
        ConfigReader(JsonValue(parameters, reader.members["rope_parameters"].span), lossy=reader.lossy)
        if parameters
        else None
    )
    flat = reader.get("rope_theta")
    nested = inner is not None and inner.get("rope_theta") is not None
    theta = reader.number(THETA, Rope, "theta", "rope_theta") if flat is not None or not nested else 0.0
    if inner is not None and nested:
        theta = inner.number(THETA, Rope, "theta", "rope_theta")
        if flat is not None and not inner.mistakes and flat.value != theta:
            span = parameters["rope_theta"].span
            reader.complain(
                "I0203",
                f"`rope_theta` is {value_text(flat)}, but {value_text(theta)} in `rope_parameters`",
                span,
                "remove one of them",
            )
        reader.mistakes += inner.mistakes
        reader.origins |= {path: span for path, span in inner.origins.items() if path}
    rope = Rope(theta=theta, width=_rotated_width(reader, family, parameters, num_heads, hidden))
    if family.rope and not parameters and not scaling:
        defaults = parse(Source("the defaults of this type", json.dumps(dict(family.rope))))
        factor, start = (defaults.value[key].value for key in ("factor", "original_max_position_embeddings"))
        reader.filled["rope_parameters"] = f"yarn by {factor:g} from {start} tokens"
        scaled = _read_scaling(ConfigReader(defaults, lossy=reader.lossy), YarnScaling, SCALINGS["yarn"][1])
        return rope.model_copy(update={"scaling": scaled}), start
    for name, part in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if part:
            scaled, original = scaling_of(reader, name, part)
            if scaled is not None or original is not None:
                return rope.model_copy(update={"scaling": scaled}), original
    return rope, None


def _rotated_width(
    reader: ConfigReader, family: ConfigFamily, parameters: Mapping[str, JsonValue], num_heads: int, hidden: int
) -> int | None:
    """Rotated columns of a head; None if all are rotated."""
    factor = parameters.get("partial_rotary_factor") or reader.members.get("partial_rotary_factor")
    share = factor.value if factor is not None else None
    if share is None:
        share = family.rotated
    if not family.rotates_part:
        if "partial_rotary_factor" in parameters and share not in (1, None):
            reader.refuse("rope", "partial_rotary_factor", REFUSED["partial_rotary_factor"].meaning, factor)
        return None
    reader.used.add("partial_rotary_factor")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        reader.complain(
            "I0203",
            f"`partial_rotary_factor` must be above 0 and at most 1, not {value_text(share)}",
            factor.span if factor else None,
        )
        return None
    head = reader.get("head_dim")
    usual = reader.defaults.get("head_dim") or hidden // max(1, num_heads)
    width = head.value if head is not None and isinstance(head.value, int) else usual
    if share == 1:
        return None
    rotated = int(width * share)
    if rotated not in WIDTHS:
        span = factor.span if factor else head.span if head is not None else reader.origins[""]
        message = f"RoPE rotates {rotated} of {width} columns of a head; it must be {WIDTHS.start} to {WIDTHS.stop - 1}"
        reader.complain("I0203", message, span)
        return None
    return rotated


# RoPE scalings that a spec supports: rope_type → (class, keys of the config besides factor and original length).
SCALINGS: dict[str, tuple[type[Node], tuple[str, ...]]] = {
    "linear": (LinearScaling, ()),
    "llama3": (Llama3Scaling, ("low_freq_factor", "high_freq_factor")),
    "yarn": (YarnScaling, ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")),
}
# RoPE scalings that depend on the sequence length. Up to the original length they rotate as the shorter context does.
EXTENSIONS = {
    "dynamic": ("alpha",),
    "longrope": ("short_factor", "long_factor", "attention_factor", "short_mscale", "long_mscale"),
}
ROPE_KEYS = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor")


def scaling_of(
    reader: ConfigReader, name: str, part: Mapping[str, JsonValue]
) -> tuple[LinearScaling | Llama3Scaling | YarnScaling | None, int | None]:
    """The scaling in a `rope_scaling` object, and the context length before the extension: 0 if the object lacks it,
    None if there is no extension."""
    kinds = [part[key].value for key in ("rope_type", "type") if key in part and part[key].value is not None]
    kind = kinds[0] if kinds else "default"
    if kind != "default" and (not isinstance(kind, str) or kind not in {*SCALINGS, *EXTENSIONS}):
        reader.refuse("rope", name, f"a spec has no rotation of type {value_text(kind)}")
        return None, None
    cls, keys = SCALINGS.get(kind, (None, EXTENSIONS.get(kind, ())))
    known_keys = {*ROPE_KEYS, *keys, *(("truncate", "finetuned") if kind == "yarn" else ())}
    for key in sorted(set(part) - known_keys):
        text = f"`{value_text(key)[1:-1]}` of {name} = {value_text(part[key])} is unknown, and left out of this spec"
        reader.warn("I0302", "rope", text, part[key].key)
    if kind == "default":
        return None, None
    original, factor = part.get("original_max_position_embeddings"), part.get("factor")
    start = original.value if original is not None and isinstance(original.value, int) else 0
    text = f"{name}: {kind}" + (f" by {value_text(factor).removesuffix('.0')}" if factor is not None else "")
    text += f" from {start:,} tokens" if start > 0 else ""
    if cls is None:
        text += ", a context extension after pre-training: left out of this spec"
        reader.warn("I0303", "rope", text, reader.members[name].key)
        return None, max(0, start)
    text += ", a context extension: to train from scratch, remove `scaling`"
    reader.remarks.append(Remark("rope", text))
    inner = ConfigReader(JsonValue(part, reader.members[name].span), lossy=reader.lossy)
    context = reader.get("max_position_embeddings")
    if context is not None:  # `transformers` uses it if the original length is absent
        inner.defaults = {"original_max_position_embeddings": context.value}
    scaled = _read_scaling(inner, cls, keys)
    reader.mistakes += inner.mistakes
    reader.origins |= {path: span for path, span in inner.origins.items() if path}
    return scaled, max(0, start)


def _read_scaling(
    inner: ConfigReader, cls: type[Node], keys: tuple[str, ...]
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    """The scaling in an object of a config; None if it has errors, which are in `inner.mistakes`."""
    path = "model.attention.rope.scaling"
    values: dict[str, Any] = {"factor": inner.number(f"{path}.factor", cls, "factor", "factor")}
    if cls is not LinearScaling:
        values["original"] = inner.number(f"{path}.original", cls, "original", "original_max_position_embeddings")
    for key in keys:
        if inner.get(key) is not None and not (key.startswith("mscale") and inner.members[key].value == 0):
            values[key] = inner.number(f"{path}.{key}", cls, key, key)
    if cls is YarnScaling:
        values["truncate"] = inner.flag("truncate", True)
    scaled: LinearScaling | Llama3Scaling | YarnScaling = cls(**values) if not inner.mistakes else None  # type: ignore[assignment]
    return scaled
