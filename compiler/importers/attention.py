"""Attention of a Hugging Face config: MLA, grouped queries, rotation, windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from compiler.importers.families import Family
from compiler.importers.json_text import Json
from compiler.importers.reader import Reader, Remark, shown
from compiler.importers.unread_keys import REFUSED
from dsl.schema import Gqa, HeadDim, LinearScaling, Llama3Scaling, Mla, Node, Rope, YarnScaling

Attention = Mla | Gqa


def attentions(
    reader: Reader, family: Family, hidden: int, context: int, num_layers: int
) -> tuple[tuple[Attention, ...], int | None]:
    """The attention of each layer, and the tokens of a sequence before the context was extended, if it was."""
    kind: type[Node] = Mla if family.attention == "mla" else Gqa
    num_heads = reader.number("model.attention.heads", kind, "heads", "num_attention_heads")
    turned, original = _rope(reader, family, num_heads, hidden)
    found: Attention
    if family.attention == "mla":
        found = _mla(reader, num_heads, turned)
    else:
        found = _gqa(reader, family, hidden, num_heads, turned)
    slides = _sliding(reader, family, context, num_layers)
    by_layer = (found if window is None else found.model_copy(update={"window": window}) for window in slides)
    return tuple(by_layer), original


def _rope(reader: Reader, family: Family, num_heads: int, hidden: int) -> tuple[Rope, int | None]:
    """The rotation, and the length of a sequence before its context was extended."""
    parameters, scaling = reader.part("rope_parameters"), reader.part("rope_scaling")
    at = "model.attention.rope.theta"
    inner = Reader(Json(parameters, reader.members["rope_parameters"].span), lossy=reader.lossy) if parameters else None
    given = reader.get("rope_theta")
    nested = inner is not None and inner.get("rope_theta") is not None
    theta = reader.number(at, Rope, "theta", "rope_theta") if given is not None or not nested else 0.0
    if parameters and any(isinstance(each.value, Mapping) for each in parameters.values()):
        reader.refuse("rope", "rope_parameters", "a rotation of its own for each kind of layer; write them by hand")
        return Rope(theta=theta), None
    if inner is not None and nested:
        theta = inner.number(at, Rope, "theta", "rope_theta")
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
    for name, part in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if part:
            found, original = _scaling(reader, name, part)
            if found is not None or original is not None:
                return rope.model_copy(update={"scaling": found}), original
    return rope, None


def _rotated_width(
    reader: Reader, family: Family, parameters: Mapping[str, Json], num_heads: int, hidden: int
) -> int | None:
    """Columns of a head that are rotated, where that is a part of them; None where it is all."""
    found = parameters.get("partial_rotary_factor") or reader.members.get("partial_rotary_factor")
    share = found.value if found is not None else None
    if share is None:
        share = family.rotated
    if not family.rotates_part:
        if "partial_rotary_factor" in parameters and share not in (1, None):
            reader.refuse("rope", "partial_rotary_factor", REFUSED["partial_rotary_factor"][1], found)
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
    width = head.value if head is not None and isinstance(head.value, int) else hidden // max(1, num_heads)
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


def _scaling(
    reader: Reader, name: str, part: Mapping[str, Json]
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
    return _scaled(reader, name, part, cls, keys), max(0, start)


def _scaled(
    reader: Reader, name: str, part: Mapping[str, Json], cls: type[Node], keys: tuple[str, ...]
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    inner, at = Reader(Json(part, reader.members[name].span), lossy=reader.lossy), "model.attention.rope.scaling"
    values: dict[str, Any] = {"factor": inner.number(f"{at}.factor", cls, "factor", "factor")}
    if cls is not LinearScaling:
        values["original"] = inner.number(f"{at}.original", cls, "original", "original_max_position_embeddings")
    for key in keys:
        if inner.get(key) is not None and not (key.startswith("mscale") and inner.members[key].value == 0):
            values[key] = inner.number(f"{at}.{key}", cls, key, key)
    if cls is YarnScaling:
        values["truncate"] = inner.flag("truncate", True)
    reader.mistakes += inner.mistakes
    reader.origins |= {path: span for path, span in inner.origins.items() if path}
    found: LinearScaling | Llama3Scaling | YarnScaling = cls(**values) if not inner.mistakes else None  # type: ignore[assignment]
    return found


def _mla(reader: Reader, num_heads: int, rope: Rope) -> Mla:
    at = "model.attention"
    reader.used |= {"num_key_value_heads", "head_dim"}  # MLA has as many keys as queries
    return Mla(
        heads=num_heads,
        query_rank=reader.number(f"{at}.query_rank", Mla, "query_rank", "q_lora_rank", null=None),
        kv_rank=reader.number(f"{at}.kv_rank", Mla, "kv_rank", "kv_lora_rank"),
        head_dim=HeadDim(
            nope=reader.number(f"{at}.head_dim.nope", HeadDim, "nope", "qk_nope_head_dim"),
            rope=reader.number(f"{at}.head_dim.rope", HeadDim, "rope", "qk_rope_head_dim"),
            value=reader.number(f"{at}.head_dim.value", HeadDim, "value", "v_head_dim"),
        ),
        rope=rope,
    )


def _gqa(reader: Reader, family: Family, hidden: int, num_heads: int, rope: Rope) -> Gqa:
    at = "model.attention"
    width = reader.number(f"{at}.head_dim", Gqa, "head_dim", "head_dim", default=0)
    if not width:
        width = max(2, min(4096, hidden // num_heads))
        if width * num_heads != hidden and {"model.hidden", "model.attention.heads"} <= set(reader.origins):
            message = (
                f"`hidden_size` = {hidden:,} does not divide into {num_heads:,} heads, and `head_dim` is not given"
            )
            reader.complain("I0203", message, reader.origins.get("model.hidden"))
    kv_heads = num_heads
    if f"{at}.heads" in reader.origins:  # else nothing is known that the default of the model type could follow from
        kv_heads = reader.number(f"{at}.kv_heads", Gqa, "kv_heads", "num_key_value_heads", null=num_heads)
    else:
        reader.used.add("num_key_value_heads")
    biased = family.always_biased or reader.flag("attention_bias", False)
    return Gqa(
        heads=num_heads,
        kv_heads=kv_heads,
        head_dim=width,
        bias=family.bias if biased else None,
        qk_norm=_qk_norm(reader, family),
        scale=_scale(reader, family, width),
        softcap=_softcap(reader, family),
        rope=rope,
    )


def _qk_norm(reader: Reader, family: Family) -> Literal["head", "width"] | None:
    if family.may_norm:
        return "head" if reader.flag(family.may_norm, False) else None
    return family.qk_norm


def _scale(reader: Reader, family: Family, width: int) -> float | None:
    """The factor of q·k, where it is another one than the root of the width says."""
    if not family.scale:
        return None
    value = float(reader.number("model.attention.scale", Scalar, "value", family.scale))
    scale = value**-0.5 if family.scale == "query_pre_attn_scalar" else value
    return None if math.isclose(scale, width**-0.5, rel_tol=1e-12) else scale


class Scalar(Node):
    """What a config says of the scale of scores."""

    value: Annotated[float, Field(gt=0, le=1e6)]


def _softcap(reader: Reader, family: Family) -> float | None:
    if not family.softcap:
        return None
    found: float | None = reader.number(
        "model.attention.softcap", Gqa, "softcap", "attn_logit_softcapping", default=None, null=None
    )
    return found


def _sliding(reader: Reader, family: Family, context: int, num_layers: int) -> list[int | None]:
    """The window of each layer; None where there is none, or none that is shorter than the context."""
    window = reader.get("sliding_window")
    length = family.window if "sliding_window" not in reader.members else window.value if window is not None else None
    used = reader.flag("use_sliding_window", family.slides) and length not in (None, False)
    kinds = _kinds(reader, family, num_layers)
    if not used or (isinstance(length, int) and length >= context):
        return [None] * num_layers
    if family.attention == "mla" or not isinstance(length, int) or isinstance(length, bool) or length < 1:
        meaning = f"attention to the last {shown(length)} tokens, which a spec has for grouped queries alone"
        reader.refuse("attention", "sliding_window", meaning)
        return [None] * num_layers
    if window is not None:
        reader.origins["model.attention.window"] = window.span
    return [length if kind == "sliding_attention" else None for kind in kinds]


def _kinds(reader: Reader, family: Family, num_layers: int) -> list[str]:
    """`full_attention` or `sliding_attention` of each layer."""
    listed = reader.get("layer_types")
    begin = reader.count("max_window_layers", 0, 2**40, 28) if family.slides_late else 0
    plain = "sliding_attention"
    if listed is None:
        if family.slides_every:  # all but each N-th layer
            return [plain if (i + 1) % family.slides_every else "full_attention" for i in range(num_layers)]
        return [plain if i >= begin else "full_attention" for i in range(num_layers)]
    values = [each.value for each in listed.value] if isinstance(listed.value, tuple) else [listed.value]
    other = next((value for value in values if value not in (plain, "full_attention")), None)
    if other is not None:
        reader.refuse("attention", "layer_types", f"layers of {shown(other)}; a spec has full and sliding attention")
    elif len(values) != num_layers:
        reader.complain("I0203", f"`layer_types` has {len(values)} entries for {num_layers} layers", listed.span)
    else:
        return [str(value) for value in values]
    return ["full_attention"] * num_layers
