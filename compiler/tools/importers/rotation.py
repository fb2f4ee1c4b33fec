"""Rotation of a Hugging Face config: its base, the part of a head, a longer context, and what differs by layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compiler.tools.importers.families import ConfigFamily
from compiler.tools.importers.json_text import JsonValue, parse
from compiler.tools.importers.reader import REFUSED, ConfigReader, Remark, shown
from dsl.messages.diagnostics import Source
from dsl.schema import LinearScaling, Llama3Scaling, Node, Rope, YarnScaling

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers
THETA = "model.attention.rope.theta"


def rotations(
    reader: ConfigReader, family: ConfigFamily, num_heads: int, hidden: int
) -> tuple[Mapping[str, Rope], int | None]:
    """The rotation of each kind of layer, and the length of a sequence before its context was extended."""
    parameters = reader.part("rope_parameters")
    if any(isinstance(each.value, Mapping) for each in parameters.values()):
        if family.local_theta:
            return _by_kind(reader, family, parameters)
        reader.refuse("rope", "rope_parameters", "a rotation of its own for each kind of layer; write them by hand")
        rope, original = Rope(theta=1.0), None
    else:
        rope, original = _rope(reader, family, parameters, num_heads, hidden)
    local = rope
    if family.local_theta:
        local = Rope(theta=reader.number("", Rope, "theta", "rope_local_base_freq"))
    return {FULL: rope, SLIDING: local}, original


def _by_kind(
    reader: ConfigReader, family: ConfigFamily, parameters: Mapping[str, JsonValue]
) -> tuple[Mapping[str, Rope], int | None]:
    """The rotations that `rope_parameters` has by kind of layer."""
    found: dict[str, Rope] = {}
    before: int | None = None
    bases = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
    reader.used |= {*bases.values(), "rope_scaling"}
    for key in sorted({*parameters} - {*bases}):
        text = f"`{shown(key)[1:-1]}` of rope_parameters is not known, and not in this spec"
        reader.warn("I0302", "rope", text, parameters[key].key)
    for kind, base in bases.items():
        part = parameters[kind].value if kind in parameters else {}
        part = part if isinstance(part, Mapping) else {}
        inner = ConfigReader(JsonValue(part, reader.members["rope_parameters"].span), lossy=reader.lossy)
        theta = inner.number(THETA, Rope, "theta", "rope_theta", default=family.defaults[base])
        reader.mistakes += inner.mistakes
        scaling, original = scaling_of(reader, "rope_parameters", part) if part else (None, None)
        found[kind] = Rope(theta=theta, scaling=scaling)
        before = original if original is not None else before
    return found, before


def _rope(
    reader: ConfigReader, family: ConfigFamily, parameters: Mapping[str, JsonValue], num_heads: int, hidden: int
) -> tuple[Rope, int | None]:
    """The rotation of all layers, and the length of a sequence before its context was extended."""
    scaling = reader.part("rope_scaling")
    inner = (
        ConfigReader(JsonValue(parameters, reader.members["rope_parameters"].span), lossy=reader.lossy)
        if parameters
        else None
    )
    given = reader.get("rope_theta")
    nested = inner is not None and inner.get("rope_theta") is not None
    theta = reader.number(THETA, Rope, "theta", "rope_theta") if given is not None or not nested else 0.0
    if inner is not None and nested:
        theta = inner.number(THETA, Rope, "theta", "rope_theta")
        if given is not None and not inner.mistakes and given.value != theta:
            span = parameters["rope_theta"].span
            reader.complain(
                "I0203",
                f"`rope_theta` is {shown(given)}, in `rope_parameters` {shown(theta)}",
                span,
                "remove one of them",
            )
        reader.mistakes += inner.mistakes
        reader.origins |= {path: span for path, span in inner.origins.items() if path}
    rope = Rope(theta=theta, width=_rotated_width(reader, family, parameters, num_heads, hidden))
    if family.rope and not parameters and not scaling:
        usual = parse(Source("the defaults of this type", json.dumps(dict(family.rope))))
        factor, start = (usual.value[key].value for key in ("factor", "original_max_position_embeddings"))
        reader.filled["rope_parameters"] = f"yarn by {factor:g} from {start} tokens"
        found = _scaled(ConfigReader(usual, lossy=reader.lossy), YarnScaling, SCALINGS["yarn"][1])
        return rope.model_copy(update={"scaling": found}), start
    for name, part in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if part:
            found, original = scaling_of(reader, name, part)
            if found is not None or original is not None:
                return rope.model_copy(update={"scaling": found}), original
    return rope, None


def _rotated_width(
    reader: ConfigReader, family: ConfigFamily, parameters: Mapping[str, JsonValue], num_heads: int, hidden: int
) -> int | None:
    """Columns of a head that are rotated, where that is a part of them; None where it is all."""
    found = parameters.get("partial_rotary_factor") or reader.members.get("partial_rotary_factor")
    share = found.value if found is not None else None
    if share is None:
        share = family.rotated
    if not family.rotates_part:
        if "partial_rotary_factor" in parameters and share not in (1, None):
            reader.refuse("rope", "partial_rotary_factor", REFUSED["partial_rotary_factor"].meaning, found)
        return None
    reader.used.add("partial_rotary_factor")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        reader.complain(
            "I0203",
            f"`partial_rotary_factor` is above 0 and at most 1, {shown(share)} is not",
            found.span if found else None,
        )
        return None
    head = reader.get("head_dim")
    usual = reader.defaults.get("head_dim") or hidden // max(1, num_heads)
    width = head.value if head is not None and isinstance(head.value, int) else usual
    return None if share == 1 else int(width * share)


# The rotations of longer contexts that a spec has: their keys in a config, and whether they are written in a spec.
SCALINGS: dict[str, tuple[type[Node], tuple[str, ...]]] = {
    "linear": (LinearScaling, ()),
    "llama3": (Llama3Scaling, ("low_freq_factor", "high_freq_factor")),
    "yarn": (YarnScaling, ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")),
}
# Others change with the length of a sequence, and are those of the shorter context until it is exceeded.
EXTENSIONS = {
    "dynamic": ("alpha",),
    "longrope": ("short_factor", "long_factor", "attention_factor", "short_mscale", "long_mscale"),
}
ROPE_KEYS = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor")


def scaling_of(
    reader: ConfigReader, name: str, part: Mapping[str, JsonValue]
) -> tuple[LinearScaling | Llama3Scaling | YarnScaling | None, int | None]:
    """What a `rope_scaling` asks for, and the length of a sequence before the extension: 0 if it is not told, None if
    there was none."""
    kinds = [part[key].value for key in ("rope_type", "type") if key in part and part[key].value is not None]
    kind = kinds[0] if kinds else "default"
    if kind != "default" and (not isinstance(kind, str) or kind not in {*SCALINGS, *EXTENSIONS}):
        reader.refuse("rope", name, f"a spec has no rotation of type {shown(kind)}")
        return None, None
    cls, keys = SCALINGS.get(kind, (None, EXTENSIONS.get(kind, ())))
    known = {*ROPE_KEYS, *keys, *(("truncate", "finetuned") if kind == "yarn" else ())}
    for key in sorted(set(part) - known):
        text = f"`{shown(key)[1:-1]}` of {name} = {shown(part[key])} is not known, and not in this spec"
        reader.warn("I0302", "rope", text, part[key].key)
    if kind == "default":
        return None, None
    given, factor = part.get("original_max_position_embeddings"), part.get("factor")
    start = given.value if given is not None and isinstance(given.value, int) else 0
    text = f"{name}: {kind}" + (f" by {shown(factor).removesuffix('.0')}" if factor is not None else "")
    text += f" from {start:,} tokens" if start > 0 else ""
    if cls is None:
        text += ", an extension of the context after pre-training: not in this spec"
        reader.warn("I0303", "rope", text, reader.members[name].key)
        return None, max(0, start)
    text += ", an extension of the context: to train from the beginning, remove `scaling`"
    reader.remarks.append(Remark("rope", text))
    inner = ConfigReader(JsonValue(part, reader.members[name].span), lossy=reader.lossy)
    context = reader.get("max_position_embeddings")
    if context is not None:  # which `transformers` takes where the context before is not said
        inner.defaults = {"original_max_position_embeddings": context.value}
    scaled = _scaled(inner, cls, keys)
    reader.mistakes += inner.mistakes
    reader.origins |= {path: span for path, span in inner.origins.items() if path}
    return scaled, max(0, start)


def _scaled(
    inner: ConfigReader, cls: type[Node], keys: tuple[str, ...]
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    """The scaling that an object of a configuration says; None where it has mistakes, which are the reader's."""
    at = "model.attention.rope.scaling"
    values: dict[str, Any] = {"factor": inner.number(f"{at}.factor", cls, "factor", "factor")}
    if cls is not LinearScaling:
        values["original"] = inner.number(f"{at}.original", cls, "original", "original_max_position_embeddings")
    for key in keys:
        if inner.get(key) is not None and not (key.startswith("mscale") and inner.members[key].value == 0):
            values[key] = inner.number(f"{at}.{key}", cls, key, key)
    if cls is YarnScaling:
        values["truncate"] = inner.flag("truncate", True)
    found: LinearScaling | Llama3Scaling | YarnScaling = cls(**values) if not inner.mistakes else None  # type: ignore[assignment]
    return found
