"""Attention of a Hugging Face config: MLA, grouped queries, rotation, windows."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.importers.families import Family
from compiler.importers.json_text import Json
from compiler.importers.reader import Reader, shown
from compiler.importers.unread_keys import REFUSED
from dsl.schema import Gqa, HeadDim, Mla, Node, Rope


def attention(reader: Reader, family: Family, hidden: int, context: int) -> tuple[Mla | Gqa, int | None]:
    """The attention of every layer, and the tokens of a sequence before the context was extended, if it was."""
    kind: type[Node] = Mla if family.attention == "mla" else Gqa
    num_heads = reader.number("model.attention.heads", kind, "heads", "num_attention_heads")
    turned, original = _rope(reader, family)
    _windows(reader, family, context)
    if family.attention == "mla":
        return _mla(reader, num_heads, turned), original
    return _gqa(reader, family, hidden, num_heads, turned), original


def _rope(reader: Reader, family: Family) -> tuple[Rope, int | None]:
    """The rotation, and the length of a sequence before its context was extended."""
    parameters, scaling = reader.part("rope_parameters"), reader.part("rope_scaling")
    at = "model.attention.rope.theta"
    inner = Reader(Json(parameters, reader.members["rope_parameters"].span), lossy=reader.lossy) if parameters else None
    given = reader.get("rope_theta")
    nested = inner is not None and inner.get("rope_theta") is not None
    theta = reader.number(at, Rope, "theta", "rope_theta") if given is not None or not nested else 0.0
    if parameters and any(isinstance(each.value, Mapping) for each in parameters.values()):
        reader.refuse("rope", "rope_parameters", "a rotation of its own for each kind of layer; a spec has one")
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
    for name, part in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if part and (original := _extension(reader, name, part)) is not None:
            return Rope(theta=theta), original
    return Rope(theta=theta), None


# what an extension of the context consists of; anything else is reported
EXTENSIONS = {
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate", "finetuned"),
    "linear": (),
    "dynamic": ("alpha",),
    "longrope": ("short_factor", "long_factor", "attention_factor", "short_mscale", "long_mscale"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
}
ROPE_KEYS = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor")


def _extension(reader: Reader, name: str, part: Mapping[str, Json]) -> int | None:
    """What a `rope_scaling` asks for. Returns the length of a sequence before the extension, 0 if it is not told."""
    kinds = [part[key].value for key in ("rope_type", "type") if key in part and part[key].value is not None]
    kind = kinds[0] if kinds else "default"
    rotated = part.get("partial_rotary_factor")
    if rotated is not None and rotated.value not in (1, None):
        reader.refuse("rope", "partial_rotary_factor", REFUSED["partial_rotary_factor"][1], rotated)
    if kind != "default" and (not isinstance(kind, str) or kind not in EXTENSIONS):
        reader.refuse("rope", name, f"a spec has no rotation of type {shown(kind)}")
        return None
    unknown = set(part) - set(ROPE_KEYS) - set(EXTENSIONS.get(kind, ()))
    for key in sorted(unknown):
        text = f"`{shown(key)[1:-1]}` of {name} = {shown(part[key])} is not known, and not in this spec"
        reader.warn("I0302", "rope", text, part[key].key)
    if kind == "default":
        return None
    original, factor = part.get("original_max_position_embeddings"), part.get("factor")
    start = original.value if original is not None and isinstance(original.value, int) else 0
    text = f"{name}: {kind}" + (f" by {shown(factor).removesuffix('.0')}" if factor is not None else "")
    text += f" from {start:,} tokens" if start > 0 else ""
    text += ", an extension of the context after pre-training: not in this spec"
    reader.warn("I0303", "rope", text, reader.members[name].key)
    return max(0, start)


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
    return Gqa(
        heads=num_heads,
        kv_heads=kv_heads,
        head_dim=width,
        qk_norm=family.qk_norm,
        rope=rope,
    )


def _windows(reader: Reader, family: Family, context: int) -> None:
    """A sliding window is refused where it is shorter than the context."""
    window = reader.get("sliding_window")
    length = family.window if "sliding_window" not in reader.members else window.value if window is not None else None
    used = reader.flag("use_sliding_window", family.slides) and length not in (None, False)
    if used and not (isinstance(length, int) and length >= context):
        meaning = f"attention to the last {shown(length)} tokens; a spec attends to all"
        reader.refuse("attention", "sliding_window", meaning)
    kinds = reader.get("layer_types")
    if kinds is None:
        return
    listed = kinds.value if isinstance(kinds.value, tuple) else (kinds,)
    other = next((each for each in listed if each.value != "full_attention"), None)
    if other is not None:
        reader.refuse("attention", "layer_types", f"layers of {shown(other)}; a spec attends to all tokens", kinds)
